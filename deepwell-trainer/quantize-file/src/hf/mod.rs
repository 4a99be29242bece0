//! Quantized model folders for inference engines: `deepwell export hf --quantize`.
//!
//! vLLM and SGLang read two conventions ([`Convention`]), which differ
//! in names, in the configuration, and in the tensor scale of NVFP4: ModelOpt stores the factor,
//! compressed-tensors the reciprocal. `docs/formats.md` has the tables.

mod choice;
mod config;
mod decode;
mod folder;
mod groups;
mod matrix;
mod names;
mod options;
mod write;

pub(super) use self::decode::{FolderConfig, folder_config, planes_of};
pub(super) use self::folder::{CONFIG, copy_other_files};
pub use self::folder::{QuantizedFolder, quantize_folder};
pub use self::names::{Convention, FolderFormat};
pub use self::options::{AssignedWeight, QuantizeFolderOptions};
