//! Errors of checkpoints.

use std::io;
use std::path::PathBuf;

use crate::region::Region;
use crate::tensor::{CkptDtype, Section};

/// Why a checkpoint could not be written, found or read.
///
/// Each message is self-contained: it includes the error of the operating system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    // Saving.
    /// A floating-point tensor holds NaN or an infinity. Nothing was written.
    #[error(
        "tensor `{name}` ({section}, {dtype}): expected finite values, got {value} at element \
         {index}; nothing was saved\n\
         hint: the newest earlier checkpoint is untouched; resume from it"
    )]
    NonFinite {
        /// Section of the tensor.
        section: Section,
        /// Name of the tensor.
        name: String,
        /// Element type of the tensor.
        dtype: CkptDtype,
        /// Row-major index of the first non-finite element.
        index: usize,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// The length of a tensor's data does not match its shape. Nothing was written.
    #[error(
        "tensor `{name}` ({section}): expected {expected_bytes} bytes for {shape:?} {dtype}, got \
         {got_bytes}"
    )]
    DataLength {
        /// Section of the tensor.
        section: Section,
        /// Name of the tensor.
        name: String,
        /// Element type of the tensor.
        dtype: CkptDtype,
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Bytes required by shape and element type.
        expected_bytes: u128,
        /// Bytes given.
        got_bytes: usize,
    },
    /// Two tensors of one section have the same name. Nothing was written.
    #[error("tensor `{name}` appears twice in section {section}: names must be unique in it")]
    DuplicateTensor {
        /// Section of both tensors.
        section: Section,
        /// Name of both tensors.
        name: String,
    },
    /// A tensor's name cannot be stored. Nothing was written.
    #[error("tensor name `{name}` cannot be stored: it is empty or reserved by safetensors")]
    InvalidName {
        /// The name.
        name: String,
    },
    /// The parts written by the ranks do not cover their tensors. Nothing was published.
    #[error(
        "the checkpoint of step {step} is not complete: {detail}; nothing was published\n\
         hint: the newest earlier checkpoint is untouched"
    )]
    Incomplete {
        /// Step of the checkpoint.
        step: u64,
        /// Description of the missing or overlapping part.
        detail: String,
    },
    /// Invalid value of an option. Nothing was written.
    #[error("checkpoint option `{option}`: expected {expected}, got {got}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// Valid values.
        expected: &'static str,
        /// The given value.
        got: u64,
    },
    /// Another writer held the folder's lock for too long. Nothing was written.
    #[error(
        "another process has been saving into `{}` for {waited_s} s\n\
         hint: give each run a folder of its own", root.display()
    )]
    WriterBusy {
        /// The folder of checkpoints.
        root: PathBuf,
        /// Seconds waited.
        waited_s: u64,
    },
    /// The file system is full. The half-written folder was removed.
    #[error(
        "no space left while writing `{}`: the checkpoint of step {step} needs {bytes_needed} \
         bytes; nothing was published\n\
         hint: free some space, or keep fewer checkpoints", path.display()
    )]
    NoSpace {
        /// The file that could not be written.
        path: PathBuf,
        /// Step of the checkpoint.
        step: u64,
        /// Total bytes of all tensors to be written.
        bytes_needed: u64,
    },

    // Saving and loading.
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

    // Loading.
    /// The folder is not a complete checkpoint.
    #[error("`{}` is not a checkpoint: {reason}", path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
        /// What is missing, and where to look instead.
        reason: String,
    },
    /// A checkpoint has no manifest, or no checksum of the manifest.
    #[error(
        "checkpoint `{}` is damaged: it has no `{file}`\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    ManifestMissing {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the file.
        file: String,
    },
    /// The manifest's bytes do not match their checksum.
    #[error(
        "manifest `{}` is damaged: expected checksum {expected}, got {got}\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    ManifestChecksum {
        /// The manifest.
        path: PathBuf,
        /// Checksum in `manifest.blake3`.
        expected: String,
        /// Checksum of the actual bytes.
        got: String,
    },
    /// The manifest is intact but invalid.
    #[error("manifest `{}` is not valid: {detail}", path.display())]
    ManifestInvalid {
        /// The manifest.
        path: PathBuf,
        /// Description of the error.
        detail: String,
    },
    /// The checkpoint was written by another version of the format.
    #[error(
        "manifest `{}`: expected format version {expected}, got {got}\n\
         hint: load it with the release of Deepwell that wrote it", path.display()
    )]
    FormatVersion {
        /// The manifest.
        path: PathBuf,
        /// The version supported by this library.
        expected: u64,
        /// The version of the file.
        got: u64,
    },
    /// A file of the checkpoint is missing.
    #[error(
        "file `{}` is damaged: expected {expected_bytes} bytes, got no such file\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    FileMissing {
        /// The file.
        path: PathBuf,
        /// Length when written.
        expected_bytes: u64,
    },
    /// A file of the checkpoint has another length than when written.
    #[error(
        "file `{}` is damaged: expected {expected_bytes} bytes, got {got_bytes}\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Length when written.
        expected_bytes: u64,
        /// Actual length.
        got_bytes: u64,
    },
    /// The bytes of a tensor do not match their checksum.
    #[error(
        "tensor `{name}` ({section}) is damaged: file `{}`, {bytes} bytes at offset {offset}: \
         expected checksum {expected}, got {got}\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    TensorChecksum {
        /// The shard.
        path: PathBuf,
        /// Section of the tensor.
        section: Section,
        /// Name of the tensor.
        name: String,
        /// First byte of the tensor in the file.
        offset: u64,
        /// Length of the tensor.
        bytes: u64,
        /// Checksum in the manifest.
        expected: String,
        /// Checksum of the actual bytes.
        got: String,
    },
    /// The checkpoint has no such tensor.
    #[error(
        "checkpoint `{}` has no tensor `{name}` in section {section} ({hint})", path.display()
    )]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Requested section.
        section: Section,
        /// Requested name.
        name: String,
        /// What the checkpoint has instead.
        hint: String,
    },
    /// A tensor has another type or shape than requested.
    #[error(
        "tensor `{name}` ({section}): expected {expected_shape:?} {expected_dtype}, got \
         {got_shape:?} {got_dtype}\n\
         hint: `{}` belongs to another model or policy", path.display()
    )]
    TensorMismatch {
        /// The checkpoint.
        path: PathBuf,
        /// Section of the tensor.
        section: Section,
        /// Name of the tensor.
        name: String,
        /// Requested element type.
        expected_dtype: CkptDtype,
        /// Requested shape.
        expected_shape: Vec<usize>,
        /// Element type in the checkpoint.
        got_dtype: CkptDtype,
        /// Shape in the checkpoint.
        got_shape: Vec<usize>,
    },
    /// A region outside of its tensor.
    #[error(
        "tensor `{name}` ({section}): expected a part of {shape:?}, got {:?} at {:?}",
        region.shape, region.offset
    )]
    NoRegion {
        /// Section of the tensor.
        section: Section,
        /// Name of the tensor.
        name: String,
        /// Shape of the tensor.
        shape: Vec<usize>,
        /// Requested region.
        region: Region,
    },
    /// The buffer for a tensor has the wrong length.
    #[error(
        "tensor `{name}` ({section}): expected a buffer of {expected_bytes} bytes, got {got_bytes}"
    )]
    BufferLength {
        /// Section of the tensor.
        section: Section,
        /// Name of the tensor.
        name: String,
        /// Bytes of the tensor.
        expected_bytes: u64,
        /// Bytes of the buffer.
        got_bytes: usize,
    },
}

impl CheckpointError {
    /// Whether a checkpoint exists but any part of it is damaged.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        use CheckpointError::*;
        matches!(
            self,
            ManifestMissing { .. }
                | ManifestChecksum { .. }
                | ManifestInvalid { .. }
                | FileMissing { .. }
                | FileLength { .. }
                | TensorChecksum { .. }
        )
    }

    /// For `map_err`: the operating system failed to perform `action` on `path`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| CheckpointError::Io { action, path, cause }
    }
}
