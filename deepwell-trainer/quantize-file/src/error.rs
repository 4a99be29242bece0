//! Errors of quantizing and dequantizing a model.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Errors of [`super::quantize`] and [`super::dequantize`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum QuantizeFileError {
    /// A file or folder cannot be used.
    #[error("cannot {action} `{}`: {source}", path.display())]
    Io {
        /// The attempted action.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file is invalid.
    #[error("`{}` is not valid: {detail}", path.display())]
    InvalidFile {
        /// The file.
        path: PathBuf,
        /// Description of the error.
        detail: String,
    },
    /// A folder without a model.
    #[error(
        "no model in `{}`: expected `model.safetensors` or `model.safetensors.index.json`",
        path.display()
    )]
    NoModel {
        /// The folder.
        path: PathBuf,
    },
    /// The output exists already.
    #[error("`{}` exists already\nhint: `--force` writes over it", path.display())]
    Exists {
        /// The output.
        path: PathBuf,
    },
    /// The output is one of the input files.
    #[error(
        "`{}` is also the input\nhint: name another output; the input is read while it is written",
        path.display()
    )]
    SameFile {
        /// Input and output.
        path: PathBuf,
    },
    /// The input was already quantized by [`super::quantize`].
    #[error(
        "`{}` holds {format} already\nhint: quantize the model that it was made from, since every \
         rounding loses bits; `--dequantize` brings numbers back",
        path.display()
    )]
    AlreadyQuantized {
        /// The file.
        path: PathBuf,
        /// Format of the input.
        format: &'static str,
    },
    /// The input of [`super::dequantize`] has not been quantized.
    #[error(
        "`{}` has not been written by `deepwell quantize`: expected `{key}` in its metadata",
        path.display()
    )]
    NotQuantized {
        /// The file.
        path: PathBuf,
        /// The missing key.
        key: &'static str,
    },
    /// A folder without a configuration.
    #[error(
        "no model in `{}`: expected `config.json`, which states the modules of the weights",
        path.display()
    )]
    NoConfig {
        /// The folder.
        path: PathBuf,
    },
    /// No inference engine reads the tensor quantized.
    #[error(
        "tensor `{name}` cannot be exported quantized: expected {expected}, got {got}\nhint: {hint}"
    )]
    NotLoadable {
        /// The tensor.
        name: String,
        /// What engines read.
        expected: String,
        /// What the tensor is.
        got: String,
        /// Remedy.
        hint: &'static str,
    },
    /// A value that must be finite is NaN or infinite.
    #[error("tensor `{name}`: expected finite values, got NaN or an infinity in {what}")]
    NotFinite {
        /// The tensor.
        name: String,
        /// Where in the tensor.
        what: String,
    },
    /// Nothing in the model would be quantized.
    #[error(
        "no tensor of the model is to be quantized\nhint: a `[[rule]]` in the policy file with \
         `format = \"mxfp8\"` names tensors; they need the type F32, BF16 or F16"
    )]
    NothingToQuantize,
    /// The tiles of such a wide matrix do not fit into the buffers.
    #[error(
        "tensor `{name}` has rows of {cols} elements: expected {cols_max} at most for tiled \
         scales\nhint: `--layout plain`, or keep the tensor with a rule of `--policy`"
    )]
    TooWide {
        /// The tensor.
        name: String,
        /// Elements of a row.
        cols: usize,
        /// Maximum number of elements of a row.
        cols_max: usize,
    },
    /// The policy does not fit the model.
    #[error(transparent)]
    Policy(#[from] deepwell_precision::PolicyError),
    /// A buffer has the wrong length.
    #[error(transparent)]
    Quantize(#[from] deepwell_precision::QuantizeError),
}

impl QuantizeFileError {
    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    pub(super) fn invalid(path: impl Into<PathBuf>, detail: impl Into<String>) -> Self {
        Self::InvalidFile { path: path.into(), detail: detail.into() }
    }
}
