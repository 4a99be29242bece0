//! Writes Hugging Face weights: a safetensors file or a whole folder. `Weights` of `deepwell-ir`
//! reads them.
//!
//! ```
//! use deepwell_ckpt::hf::{WriteTensor, write};
//! use deepwell_ir::capture::Weights;
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let values = [0.5f32, -1.0, 2.0, 0.0, 0.25, 8.0];
//! write(
//!     &folder.join("model.safetensors"),
//!     &[WriteTensor::from_f32("lm_head.weight", &[2, 3], &values)],
//! )?;
//!
//! assert_eq!(Weights::open(folder)?.read_f32("lm_head.weight", &[2, 3])?, values);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod folder;
mod write;

use std::io;
use std::path::PathBuf;

pub use folder::{FolderOptions, FolderTensor, WrittenFolder, write_folder};
pub use write::{WriteTensor, write};

/// Why weights could not be written. Each message is self-contained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HfError {
    /// A file is not well-formed.
    #[error("`{}` is not valid: {detail}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// Description of the error.
        detail: String,
    },
    /// A value is NaN or infinite, or becomes infinite in the requested type.
    #[error(
        "tensor `{name}` in `{}`: expected finite values, got {value} at element {index}",
        path.display()
    )]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Row-major index of the first non-finite element.
        index: usize,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// A tensor cannot be written.
    #[error("tensor `{name}` cannot be written: {detail}")]
    InvalidTensor {
        /// The tensor.
        name: String,
        /// Reason.
        detail: String,
    },
    /// The destination of a folder already exists.
    #[error(
        "`{}`: expected no such file or folder, or an empty folder\n\
         hint: nothing is written over; name another folder", path.display()
    )]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// An operation of the operating system failed.
    #[error("cannot {action} `{}`: {cause}", path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// Its file or folder.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
}
