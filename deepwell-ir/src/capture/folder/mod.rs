//! Model folders: weight files and a configuration.

mod foreign_weights;
mod stored_part;
mod tensors;
mod weight_files;

pub use stored_part::StoredPart;
pub use tensors::{ModelFolder, StoredTensor};
pub use weight_files::{WeightFiles, WeightTensor};

pub(super) use tensors::{HEAD, find_tensors, missing_tensor, note_dtypes, unexpected_tensor};
