//! Reads a Hugging Face model (gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, deepseek_v3,
//! gpt_oss): its `config.json`, the headers of its weight files, and the graph of its forward
//! pass.
//!
//! # Brief overview
//!
//! [`LlamaConfig::from_json`] and [`LlamaConfig::from_path`] take every key of a `config.json`
//! into account: it sets a field, or it is known to be without effect on training (a line of
//! [`CaptureNotes`] says so where that is not obvious), or it is an error that names the key.
//! [`LlamaConfig::parameters`] lists the tensors of the model, [`ModelFolder::open`] compares
//! that list with the weight files without reading any weight, and [`capture`] builds the
//! [`Graph`](crate::Graph). GPT-2 has a configuration of its own, [`Gpt2Config`], with the same
//! functions; its graph is from [`capture_gpt2`], its folder opens with
//! [`ModelFolder::open_gpt2`]. [`ModelConfig`] is either, for those who take any model.
//!
//! Mixtures of experts are graphs too, with the tags `router` and `experts`; a layer's experts are
//! one node ([`Experts`](crate::ops::Experts)), which `deepwell_moe::expand` turns into ops.
//! [`LlamaConfig::stored_tensors`] lists what their weight files hold, packed or not.
//!
//! [`Pt2Model`] reads what `torch.export.save` writes, a graph of PyTorch's own ops with its
//! weights, and finds the same ops in it by their patterns.
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
pub use folder::{ModelFolder, StoredPart, StoredTensor, WeightFiles, WeightTensor};
pub use gpt2::{Gpt2Config, capture_gpt2};
pub use llama::{
    CaptureNotes, ExpertsConfig, HiddenAct, LatentConfig, LlamaConfig, ModelFamily, ParameterRole,
    ParameterSpec, Rope, RopeScaling, StoredDType, StoredElement, StoredSpec, WeightPacking,
    YarnScaling, capture, capture_for_sequence,
};
pub use model_config::ModelConfig;
pub use pt2::{ArchiveTensor, OpaqueCall, Pt2Model};
