//! Reads a Hugging Face model (gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v3,
//! gpt_oss, phi3): `config.json`, the headers of the weight files, and the graph of the forward
//! pass.
//!
//! # Brief overview
//!
//! [`LlamaConfig::from_json`] and [`LlamaConfig::from_path`] account for every key of a
//! `config.json`: a key sets a field, has no effect on training ([`CaptureNotes`] has a remark
//! unless this is obvious), or is an error. [`LlamaConfig::parameters`] lists the tensors of the
//! model, [`ModelFolder::open`] compares the list with the headers of the weight files, and
//! [`capture`] builds the [`Graph`](crate::Graph). GPT-2 has a separate configuration,
//! [`Gpt2Config`], with the same functions; [`capture_gpt2`] builds its graph. [`ModelConfig`] is
//! either of the two configurations.
//!
//! Mixtures of experts are graphs with the tags `router` and `experts`. A layer's experts are one
//! node ([`Experts`](crate::ops::Experts)), which `deepwell_moe::expand` replaces by ops.
//! [`LlamaConfig::stored_tensors`] lists the contents of the weight files, packed or not.
//!
//! [`Pt2Model`] reads the output of `torch.export.save`, a graph of PyTorch ops with weights, and
//! recognizes the ops of this crate by patterns.
//!
//! ```
//! use deepwell_ir::capture::{LlamaConfig, capture};
//!
//! # fn main() -> Result<(), deepwell_ir::capture::CaptureError> {
//! let text = r#"{
//!     "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 88,
//!     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
//!     "use_cache": true
//! }"#;
//! let (config, notes) = LlamaConfig::from_json(text, "config.json")?;
//! assert_eq!(config.head_dim, 8);
//! assert_eq!(notes.without_effect, ["use_cache"]);
//! let graph = capture(&config)?;
//! assert_eq!(graph.parameter_count(), config.parameter_count());
//! # Ok(())
//! # }
//! ```

mod blocks;
mod error;
mod folder;
mod gpt2;
mod json;
mod llama;
mod model_config;
mod pt2;

pub use error::CaptureError;
pub use folder::{ModelFolder, ModelWeights, StoredSlice, StoredTensor, WeightFiles, Weights};
pub use gpt2::{Gpt2Config, capture_gpt2};
pub use llama::{
    CaptureNotes, ExpertsConfig, HiddenAct, LatentConfig, LlamaConfig, ModelFamily, ParameterRole,
    ParameterSpec, Rope, RopeScaling, StoredDType, StoredElement, StoredSpec, WeightPacking,
    YarnScaling, capture, capture_for_sequence,
};
pub use model_config::ModelConfig;
pub use pt2::{ArchiveTensor, OpaqueCall, Pt2Model};
