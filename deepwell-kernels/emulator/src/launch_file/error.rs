//! Errors of launch files.

use std::path::PathBuf;

use thiserror::Error;

use super::npy::NpyError;
use crate::error::EmulatorError;

/// A launch that cannot be run. Misbehavior of a kernel is not an error but an
/// [`Outcome`](super::Outcome).
#[derive(Debug, Error)]
pub enum LaunchFileError {
    /// A file that cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The document has a syntax error.
    #[error("{file}: {message}")]
    Toml {
        /// Name of the document.
        file: String,
        /// Location, expected and actual text.
        message: String,
    },
    /// The document is inconsistent, or contradicts a referenced file.
    #[error("{file}: {message}")]
    Field {
        /// Name of the document.
        file: String,
        /// Field, expected and actual value.
        message: String,
    },
    /// A `.npy` file that cannot be read.
    #[error("{}", .path.display())]
    Npy {
        /// Path of the file.
        path: PathBuf,
        /// Cause.
        source: NpyError,
    },
    /// The emulator cannot run the PTX or rejects the launch.
    #[error("{}", .path.display())]
    Ptx {
        /// Path of the PTX file.
        path: PathBuf,
        /// Cause.
        source: EmulatorError,
    },
}
