//! Writes a checkpoint to a temporary folder, syncs it, and renames it into place.
//!
//! Safety rests on the order of operations:
//!
//! 1. every floating-point value is checked before anything is written;
//! 2. `.tmp-step-N-PID/` is filled: shards, manifest, manifest checksum, each file synced;
//! 3. the folder is synced, so that its entries are on disk;
//! 4. it is renamed to `step-N/`; from here on it is listed, and complete;
//! 5. the parent is synced, so that the new name survives a power failure;
//! 6. older checkpoints are renamed to `.pruned-…` before they are removed, so that a kill during a
//!    removal leaves no partial checkpoint in the listing.
//!
//! If step N already exists, it is renamed to `.replaced-step-N-PID` between 3 and 4. While
//! `step-N` is missing, the renamed folder is listed instead, so one of the two is always present.
//!
//! If several ranks save, the first rank creates the folder of step 2 and each rank writes separate
//! shards into it. The first rank writes the manifest once all ranks have reported their shards, so
//! a rank that dies earlier leaves nothing that is listed ([`crate::CheckpointWriter`]).
//!
//! A writer holds a lock on `.lock` in the folder, which the kernel releases with the process. So
//! every unpublished folder that the lock holder finds was left by a dead process or a failed save.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint_writer::{TemporaryFolder, write_slices};
use crate::error::CheckpointError;
use crate::finite::first_non_finite;
use crate::io::{DiskIo, Io};
use crate::region::Region;
use crate::tensor::{SliceView, TensorView, tensor_bytes};

/// Name reserved by safetensors.
const RESERVED_NAME: &str = "__metadata__";

/// Contents of one checkpoint. The tensors are borrowed and never copied.
///
/// The JSON sections belong to the caller; this crate stores and restores them unchanged, every
/// `f64` to the last bit. JSON has no NaN and no infinity: serde_json turns them into `null`, so
/// store numbers that may be non-finite as strings or bit patterns.
#[derive(Debug, Clone)]
pub struct CheckpointContents<'a> {
    /// Completed training steps.
    pub step: u64,
    /// Weights, master weights, moments, scales and the rest.
    pub tensors: Vec<TensorView<'a>>,
    /// Layout of the model on the hardware.
    pub plan: Value,
    /// Precision per tensor.
    pub policy: Value,
    /// State of the numeric guards.
    pub guards: Value,
    /// State of the random-number generators.
    pub rng: Value,
    /// Position of the next batch in the data.
    pub data_position: Value,
    /// Options, model configuration, seeds, versions.
    pub run: Value,
}

impl CheckpointContents<'_> {
    /// Contents without tensors, all JSON sections `null`.
    #[must_use]
    pub fn new(step: u64) -> Self {
        CheckpointContents {
            step,
            tensors: Vec::new(),
            plan: Value::Null,
            policy: Value::Null,
            guards: Value::Null,
            rng: Value::Null,
            data_position: Value::Null,
            run: Value::Null,
        }
    }
}

/// Options of [`save`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// Number of complete checkpoints to keep, at least 1: the new checkpoint and its predecessors
    /// with the highest steps; `None` keeps all. Checkpoints of later steps do not belong to the
    /// past of this run: they do not count and are kept.
    pub keep_last: Option<usize>,
    /// Starts another shard if the tensors of a shard would exceed this size. A larger tensor gets
    /// a shard of its own.
    pub shard_bytes_max: u64,
}

impl Default for SaveOptions {
    /// Keeps all checkpoints; shards of at most 4 GiB.
    fn default() -> Self {
        SaveOptions { keep_last: None, shard_bytes_max: 4 << 30 }
    }
}

/// A published checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedCheckpoint {
    /// Completed training steps.
    pub step: u64,
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Total bytes of all files.
    pub bytes: u64,
    /// Steps of the checkpoints removed due to `keep_last`.
    pub pruned_steps: Vec<u64>,
    /// Problems that do not affect this checkpoint, such as an old checkpoint that could not be
    /// removed. To be shown to the user.
    pub warnings: Vec<String>,
}

/// Saves a checkpoint into `root/step-N/`, which appears complete or not at all.
///
/// `root` is created if needed. A checkpoint of the same step is replaced; the old one stays
/// readable until the new one is in place. Memory: buffers of at most 1 MiB and the manifest.
///
/// # Errors
///
/// [`CheckpointError::NonFinite`], [`DataLength`](CheckpointError::DataLength),
/// [`DuplicateTensor`](CheckpointError::DuplicateTensor),
/// [`InvalidName`](CheckpointError::InvalidName) and
/// [`InvalidOption`](CheckpointError::InvalidOption) before anything is written;
/// [`WriterBusy`](CheckpointError::WriterBusy) if another process holds the folder for a minute;
/// [`NoSpace`](CheckpointError::NoSpace) and [`Io`](CheckpointError::Io) from the disk. After an
/// error the earlier checkpoints are unchanged, and the partial folder is removed.
pub fn save(
    root: &Path,
    contents: &CheckpointContents<'_>,
    options: &SaveOptions,
) -> Result<SavedCheckpoint, CheckpointError> {
    save_with(&DiskIo, root, contents, options)
}

/// [`save`] with any [`Io`].
pub(crate) fn save_with<I: Io>(
    io: &I,
    root: &Path,
    contents: &CheckpointContents<'_>,
    options: &SaveOptions,
) -> Result<SavedCheckpoint, CheckpointError> {
    check_options(options)?;
    let slices: Vec<SliceView<'_>> =
        contents.tensors.iter().cloned().map(SliceView::whole).collect();
    check_slices(&slices)?;
    let bytes_needed = slices.iter().map(|slice| slice.view.data.len() as u64).sum();
    let full = |error| name_full_disk(error, contents.step, bytes_needed);
    let temporary = TemporaryFolder::begin(io, root, contents.step).map_err(full)?;
    match write_slices(io, &temporary.folder, None, &slices, options) {
        Ok(shards) => temporary.publish(io, contents, vec![shards], options).map_err(full),
        Err(error) => {
            temporary.discard(io);
            Err(full(error))
        }
    }
}

pub(crate) fn check_options(options: &SaveOptions) -> Result<(), CheckpointError> {
    if options.keep_last == Some(0) {
        return Err(CheckpointError::InvalidOption {
            option: "keep_last",
            expected: "at least 1",
            got: 0,
        });
    }
    if options.shard_bytes_max == 0 {
        return Err(CheckpointError::InvalidOption {
            option: "shard_bytes_max",
            expected: "at least 1",
            got: 0,
        });
    }
    Ok(())
}

/// Checks a rank's parts before a byte is written.
pub(crate) fn check_slices(slices: &[SliceView<'_>]) -> Result<(), CheckpointError> {
    let mut seen = HashSet::new();
    for slice in slices {
        let tensor = &slice.view;
        let (section, dtype) = (tensor.section, tensor.dtype);
        let name = || tensor.name.to_string();
        if tensor.name.is_empty() || tensor.name == RESERVED_NAME {
            return Err(CheckpointError::InvalidName { name: name() });
        }
        if !seen.insert((section, tensor.name, &slice.global_offset)) {
            return Err(CheckpointError::DuplicateTensor { section, name: name() });
        }
        let region = Region { offset: slice.global_offset.clone(), shape: tensor.shape.clone() };
        if !region.is_within(&slice.global_shape) {
            let shape = slice.global_shape.clone();
            return Err(CheckpointError::NoRegion { section, name: name(), shape, region });
        }
        if tensor_bytes(dtype, &tensor.shape) != Some(tensor.data.len()) {
            return Err(CheckpointError::DataLength {
                section,
                name: name(),
                dtype,
                expected_bytes: tensor
                    .shape
                    .iter()
                    .fold(dtype.element_bytes() as u128, |product, &size| {
                        product.saturating_mul(size as u128)
                    }),
                shape: tensor.shape.clone(),
                got_bytes: tensor.data.len(),
            });
        }
        if let Some((index, value)) = first_non_finite(dtype, tensor.data) {
            return Err(CheckpointError::NonFinite { section, name: name(), dtype, index, value });
        }
    }
    Ok(())
}

/// Turns the error of a full disk into [`CheckpointError::NoSpace`].
pub(crate) fn name_full_disk(
    error: CheckpointError,
    step: u64,
    bytes_needed: u64,
) -> CheckpointError {
    match error {
        CheckpointError::Io { path, cause, .. }
            if matches!(
                cause.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) =>
        {
            CheckpointError::NoSpace { path, step, bytes_needed }
        }
        other => other,
    }
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
