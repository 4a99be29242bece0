//! Why a launch file cannot be used.

use std::path::PathBuf;

use thiserror::Error;

use super::npy::NpyError;
use crate::error::EmulatorError;

/// A launch that cannot be made. That a kernel does something wrong is no error: it is an
/// [`Outcome`](super::Outcome).
#[derive(Debug, Error)]
pub enum LaunchFileError {
    /// A file that cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file that cannot be written.
    #[error("cannot write {}", .path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The document is not of its form.
    #[error("{file}: {message}")]
    Toml {
        /// Its name.
        file: String,
        /// Where, what was expected and what came.
        message: String,
    },
    /// The document contradicts itself or a file that it names.
    #[error("{file}: {message}")]
    Field {
        /// Its name.
        file: String,
        /// Which field, what was expected and what came.
        message: String,
    },
    /// A `.npy` file that cannot be read.
    #[error("{}", .path.display())]
    Npy {
        /// Which.
        path: PathBuf,
        /// Why.
        source: NpyError,
    },
    /// PTX that cannot run, or a launch that the emulator refuses.
    #[error("{}", .path.display())]
    Ptx {
        /// The file.
        path: PathBuf,
        /// Why.
        source: EmulatorError,
    },
}
