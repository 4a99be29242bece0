//! Model folders: weight files and a configuration.

mod foreign_weights;
mod matching;
mod model_folder;
mod stored_slice;
mod weight_files;
mod weights;

pub use model_folder::{ModelFolder, ModelWeights};
pub use stored_slice::StoredSlice;
pub use weight_files::WeightFiles;
pub use weights::{StoredTensor, Weights};

pub(super) use matching::{HEAD, Matching};
