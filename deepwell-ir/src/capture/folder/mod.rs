//! Model folders: weight files and a configuration.

mod foreign_weights;
mod stored_slice;
mod tensors;
mod weight_files;

pub use stored_slice::StoredSlice;
pub use tensors::{ModelFolder, StoredTensor};
pub use weight_files::{WeightFiles, WeightTensor};

pub(super) use tensors::{HEAD, find_tensors, missing_tensor, note_dtypes, unexpected_tensor};
