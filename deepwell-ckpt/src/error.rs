//! Everything that can go wrong with a checkpoint.

use std::io;
use std::path::PathBuf;

use crate::region::Region;
use crate::tensor::{CkptDtype, Section};

/// Why a checkpoint could not be written, found or read.
///
/// Each message is complete by itself: an error of the operating system is part of the text.
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
        /// Row-major index of the first such element.
        index: usize,
        /// `NaN`, `inf` or `-inf`.
        value: String,
    },
    /// A tensor's bytes do not fit its shape. Nothing was written.
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
        /// Bytes that the shape and element type take.
        expected_bytes: u128,
        /// Bytes that were given.
        got_bytes: usize,
    },
    /// Two tensors of one section have the same name. Nothing was written.
    #[error("tensor `{name}` appears twice in section {section}: names must be unique in it")]
    DuplicateTensor {
        /// Section of both tensors.
        section: Section,
        /// Their name.
        name: String,
    },
    /// A tensor's name cannot be stored. Nothing was written.
    #[error("tensor name `{name}` cannot be stored: it is empty or reserved by safetensors")]
    InvalidName {
        /// The name.
        name: String,
    },
    /// The parts that ranks have written do not make up their tensors. Nothing was published.
    #[error(
        "the checkpoint of step {step} is not complete: {detail}; nothing was published\n\
         hint: the newest earlier checkpoint is untouched"
    )]
    Incomplete {
        /// Step of the checkpoint.
        step: u64,
        /// What is missing.
        detail: String,
    },
    /// An option makes no sense. Nothing was written.
    #[error("checkpoint option `{option}`: expected {expected}, got {got}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// What it may be.
        expected: &'static str,
        /// What it was.
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
        /// Seconds that this writer waited.
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
        /// Bytes of all tensors that were to be written here.
        bytes_needed: u64,
    },

    // Both ways.
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

    // Loading.
    /// The folder is not a complete checkpoint.
    #[error("`{}` is not a checkpoint: {reason}", path.display())]
    NotACheckpoint {
        /// The folder.
        path: PathBuf,
        /// What is missing, and where to look instead.
        reason: String,
    },
    /// A checkpoint lost its manifest, or the checksum of it.
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
    /// The manifest's bytes are not those that were written.
    #[error(
        "manifest `{}` is damaged: expected checksum {expected}, got {got}\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    ManifestChecksum {
        /// The manifest.
        path: PathBuf,
        /// Checksum in `manifest.blake3`.
        expected: String,
        /// Checksum of the bytes.
        got: String,
    },
    /// The manifest's bytes are intact but their meaning is not.
    #[error("manifest `{}` is not valid: {detail}", path.display())]
    ManifestInvalid {
        /// The manifest.
        path: PathBuf,
        /// What is wrong.
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
        /// The version that this library reads.
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
        /// Its length when it was written.
        expected_bytes: u64,
    },
    /// A file of the checkpoint has another length.
    #[error(
        "file `{}` is damaged: expected {expected_bytes} bytes, got {got_bytes}\n\
         hint: resume from an earlier checkpoint", path.display()
    )]
    FileLength {
        /// The file.
        path: PathBuf,
        /// Its length when it was written.
        expected_bytes: u64,
        /// Its length now.
        got_bytes: u64,
    },
    /// The bytes of a tensor are not those that were written.
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
        /// Checksum of the bytes.
        got: String,
    },
    /// The checkpoint has no such tensor.
    #[error(
        "checkpoint `{}` has no tensor `{name}` in section {section} ({hint})", path.display()
    )]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// Section that was asked for.
        section: Section,
        /// Name that was asked for.
        name: String,
        /// What it has instead.
        hint: String,
    },
    /// A tensor has another type or shape than the model at hand.
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
        /// Element type that was asked for.
        expected_dtype: CkptDtype,
        /// Shape that was asked for.
        expected_shape: Vec<usize>,
        /// Element type in the checkpoint.
        got_dtype: CkptDtype,
        /// Shape in the checkpoint.
        got_shape: Vec<usize>,
    },
    /// A rectangle that does not lie in its tensor.
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
        /// What was asked for.
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
    /// Whether a checkpoint is there and no longer as it was written, in whichever part.
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

    /// For `map_err`: the operating system refused `action` on `path`.
    pub(crate) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| CheckpointError::Io { action, path, cause }
    }
}
