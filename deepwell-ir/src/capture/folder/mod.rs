//! Model folders: weight files beside a configuration.

mod stored_part;
mod tensors;

pub use stored_part::StoredPart;
pub use tensors::{ModelFolder, StoredTensor};

pub(super) use tensors::{find_tensors, missing_tensor, note_dtypes, unexpected_tensor};
