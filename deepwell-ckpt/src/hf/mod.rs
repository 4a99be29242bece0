//! Hugging Face weights: reads model folders; writes a safetensors file or a whole folder.
//!
//! ```
//! use deepwell_ckpt::CkptDtype;
//! use deepwell_ckpt::hf::{WriteTensor, open_model_folder, write};
//!
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! let values = [0.5f32, -1.0, 2.0, 0.0, 0.25, 8.0];
//! write(
//!     &folder.join("model.safetensors"),
//!     &[WriteTensor::from_f32("lm_head.weight", &[2, 3], &values)],
//! )?;
//!
//! let model = open_model_folder(folder)?;
//! assert_eq!(model.read_f32("lm_head.weight", &[2, 3])?, values);
//! let error = model.read_f32("lm_head.weight", &[3, 2]).unwrap_err();
//! assert!(error.to_string().contains("expected shape [3, 2], got [2, 3]"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod folder;
mod read;
mod write;

use std::io;
use std::path::PathBuf;

pub use folder::{FolderOptions, FolderTensor, WrittenFolder, write_folder};
pub use read::{HfTensor, ModelFolder, open_model_folder};
pub use write::{WriteTensor, write};

/// Why weights could not be read or written. Each message is self-contained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HfError {
    /// The folder has no weights in a supported form.
    #[error("no weights in `{}`: {reason}", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// Expected files, and a hint.
        reason: String,
    },
    /// A file is not well-formed.
    #[error("`{}` is not valid: {detail}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// Description of the error.
        detail: String,
    },
    /// The model has no tensor of that name.
    #[error("tensor `{name}` is missing in `{}` ({hint})", path.display())]
    MissingTensor {
        /// The folder.
        path: PathBuf,
        /// Requested name.
        name: String,
        /// What the folder has instead.
        hint: String,
    },
    /// The element type of a tensor cannot be converted as requested.
    #[error(
        "tensor `{name}` in `{}`: expected {expected}, got {got}\n\
         hint: weights that are already quantized have to be converted first", path.display()
    )]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Supported element types.
        expected: &'static str,
        /// Actual element type.
        got: String,
    },
    /// The tensor has another shape than requested.
    #[error(
        "tensor `{name}` in `{}`: expected shape {expected:?}, got {got:?}\n\
         hint: compare the weights with `config.json`", path.display()
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Requested shape.
        expected: Vec<usize>,
        /// Shape in the file.
        got: Vec<usize>,
    },
    /// The buffer for a tensor has the wrong length.
    #[error("tensor `{name}`: expected a buffer of {expected} elements, got {got}")]
    BufferLength {
        /// The tensor.
        name: String,
        /// Elements of the tensor.
        expected: usize,
        /// Elements of the buffer.
        got: usize,
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
