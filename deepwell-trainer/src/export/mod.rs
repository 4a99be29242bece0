//! Exports trained models to a Hugging Face folder that `from_pretrained` of transformers loads.
//!
//! [`export_hf`] takes the master weights of a checkpoint, arranges them as the tensors of the
//! model's weight files (for GPT-2, the three projections of attention are one tensor), and writes
//! the tensors with the configuration and the tokenizer. [`ModelFiles::keep`] saved these two in
//! the run's folder at the start of the run, so that a checkpoint is sufficient.

mod checkpoint;
mod files;
mod quantized;
mod tensors;

pub(crate) use self::checkpoint::kept_folder;
pub use self::checkpoint::{ExportOptions, Exported, KEPT, export_hf};
pub use self::files::{ModelFiles, TokensOf};
pub use self::quantized::{ExportedQuantized, Quantization, export_hf_quantized, quantize_hf};
