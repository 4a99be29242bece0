//! Hugging Face weights: model folders in, one safetensors file or a whole folder out.
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

/// Why weights could not be read or written. Each message is complete by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HfError {
    /// The folder has no weights that this crate reads.
    #[error("no weights in `{}`: {reason}", path.display())]
    NoWeights {
        /// The folder.
        path: PathBuf,
        /// What was looked for, and what to do.
        reason: String,
    },
    /// A file is not well-formed.
    #[error("`{}` is not valid: {detail}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The model has no tensor of that name.
    #[error("tensor `{name}` is missing in `{}` ({hint})", path.display())]
    MissingTensor {
        /// The folder.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
        /// What is there instead.
        hint: String,
    },
    /// The tensor has an element type that cannot be read as asked.
    #[error(
        "tensor `{name}` in `{}`: expected {expected}, got {got}\n\
         hint: weights that are already quantized have to be converted first", path.display()
    )]
    WrongDtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// What can be read.
        expected: &'static str,
        /// Its element type.
        got: String,
    },
    /// The tensor has another shape than the model at hand.
    #[error(
        "tensor `{name}` in `{}`: expected shape {expected:?}, got {got:?}\n\
         hint: compare the weights with `config.json`", path.display()
    )]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The shape that was asked for.
        expected: Vec<usize>,
        /// The shape in the file.
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
    /// A value is NaN or infinite, or becomes infinite in the type that was asked for.
    #[error(
        "tensor `{name}` in `{}`: expected finite values, got {value} at element {index}",
        path.display()
    )]
    NonFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Row-major index of the first such element.
        index: usize,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// A tensor cannot be written.
    #[error("tensor `{name}` cannot be written: {detail}")]
    InvalidTensor {
        /// The tensor.
        name: String,
        /// Why.
        detail: String,
    },
    /// There is something where a folder is to be written.
    #[error(
        "`{}`: expected no such file or folder, or an empty folder\n\
         hint: nothing is written over; name another folder", path.display()
    )]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// The operating system refused something.
    #[error("cannot {action} `{}`: {cause}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With which file or folder.
        path: PathBuf,
        /// The operating system's answer.
        cause: io::Error,
    },
}
