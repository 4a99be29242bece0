//! Writes a checkpoint: aside, to the disk, then in one step into place.
//!
//! The order of operations is the whole of the safety:
//!
//! 1. every floating-point value is looked at, before anything is written;
//! 2. `.tmp-step-N-PID/` is filled: shards, manifest, manifest checksum, each file synced;
//! 3. the folder is synced, so that its entries are on the disk too;
//! 4. it is renamed to `step-N/`; from here on it is listed, and it is whole;
//! 5. the parent is synced, so that the new name survives a power cut;
//! 6. older ones are renamed to `.pruned-…` and only then removed, so that a kill in the middle of
//!    a removal leaves nothing half-listed.
//!
//! If step N was there already, it is renamed to `.replaced-step-N-PID` between 3 and 4. While
//! `step-N` is missing that folder is listed in its place, so at no moment is there neither.
//!
//! A writer holds a lock on `.lock` in the folder, which the kernel drops with the process. So
//! whoever holds it knows that every folder aside was left by a dead process or a failed save.

use std::collections::HashSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::CheckpointError;
use crate::finite::first_non_finite;
use crate::folder::{Aside, FolderName, entry_names, list, step_folder_name};
use crate::io::{DiskIo, HashingFile, Io};
use crate::manifest::{
    FORMAT_VERSION, FileEntry, MANIFEST_CHECKSUM_FILE, MANIFEST_FILE, Manifest, TensorEntry,
};
use crate::shard::{HeaderTensor, header_bytes};
use crate::tensor::{Section, TensorView, tensor_bytes};

/// What safetensors keeps for itself among the names of a file.
const RESERVED_NAME: &str = "__metadata__";

/// How long a writer waits for another one to finish.
const LOCK_WAIT_S: u64 = 60;

/// Everything that goes into one checkpoint. The tensors are borrowed and never copied.
///
/// The JSON sections belong to the caller; this crate stores them and gives them back as they
/// were, every `f64` to the last bit. JSON has no NaN and no infinity: serde_json turns them into
/// `null`, so keep numbers that may be such as strings or bit patterns.
#[derive(Debug, Clone)]
pub struct CheckpointContents<'a> {
    /// Training steps done.
    pub step: u64,
    /// Weights, master weights, moments, scales and the rest.
    pub tensors: Vec<TensorView<'a>>,
    /// How the model was laid out on the hardware.
    pub plan: Value,
    /// Precision per tensor.
    pub policy: Value,
    /// State of the numeric guards.
    pub guards: Value,
    /// State of the random-number generators.
    pub rng: Value,
    /// Where in the data the next batch begins.
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

/// How to save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// Keep this many complete checkpoints, at least 1: the one just written and those with the
    /// highest steps below it; `None` keeps all. Checkpoints of later steps are not of the past of
    /// the run that saves: they neither count nor go.
    pub keep_last: Option<usize>,
    /// Begin another shard when the tensors of one would take more bytes than this. A larger
    /// tensor gets a shard of its own.
    pub shard_bytes_max: u64,
}

impl Default for SaveOptions {
    /// Keeps all; shards of at most 4 GiB.
    fn default() -> Self {
        SaveOptions { keep_last: None, shard_bytes_max: 4 << 30 }
    }
}

/// A checkpoint that is on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedCheckpoint {
    /// Training steps done.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Bytes of all its files.
    pub bytes: u64,
    /// Steps of the checkpoints that `keep_last` removed.
    pub pruned_steps: Vec<u64>,
    /// What went wrong without harm to this checkpoint, such as an old one that could not be
    /// removed. To be shown to the user.
    pub warnings: Vec<String>,
}

/// Saves a checkpoint into `root/step-N/`, where it appears complete or not at all.
///
/// `root` is created if needed. A checkpoint of the same step is replaced; until the new one is
/// in place the old one stays readable. Memory: buffers of at most 1 MiB and the manifest.
///
/// # Errors
///
/// [`CheckpointError::NonFinite`], [`DataLength`](CheckpointError::DataLength),
/// [`DuplicateTensor`](CheckpointError::DuplicateTensor),
/// [`InvalidName`](CheckpointError::InvalidName) and
/// [`InvalidOption`](CheckpointError::InvalidOption) before anything is written;
/// [`WriterBusy`](CheckpointError::WriterBusy) if another process holds the folder for a minute;
/// [`NoSpace`](CheckpointError::NoSpace) and [`Io`](CheckpointError::Io) from the disk. After an
/// error the earlier checkpoints are as they were, and the half-written folder is removed.
pub fn save(
    root: &Path,
    contents: &CheckpointContents<'_>,
    options: &SaveOptions,
) -> Result<SavedCheckpoint, CheckpointError> {
    save_with(&DiskIo, root, contents, options)
}

/// [`save`], through any [`Io`].
pub(crate) fn save_with<I: Io>(
    io: &I,
    root: &Path,
    contents: &CheckpointContents<'_>,
    options: &SaveOptions,
) -> Result<SavedCheckpoint, CheckpointError> {
    check_options(options)?;
    check_tensors(&contents.tensors)?;
    fs::create_dir_all(root).map_err(CheckpointError::io("create", root))?;
    let pid = std::process::id();
    let temporary = root.join(Aside::Temporary.folder_name(contents.step, pid));
    let lock = lock_folder(root, Duration::from_secs(LOCK_WAIT_S))?;
    let mut warnings = Vec::new();
    if lock.held {
        remove_leftovers(io, root, &mut warnings)?;
    } else {
        warnings.push(format!(
            "`{}`: this file system has no locks, so folders left by dead processes are not \
             removed, and two writers would not see each other",
            root.display()
        ));
        // In a container every run may have the same process id.
        let _ = io.remove_dir_all(&temporary);
    }

    let bytes = write_aside(io, &temporary, contents, options)
        .and_then(|bytes| publish(io, root, &temporary, contents.step, pid).map(|()| bytes))
        .map_err(|error| {
            // The folder may not exist, or be in place already: then there is nothing to remove.
            let _ = io.remove_dir_all(&temporary);
            name_full_disk(error, contents)
        })?;

    let (pruned_steps, prune_warnings) = prune(io, root, contents.step, pid, options.keep_last);
    warnings.extend(prune_warnings);
    let path = root.join(step_folder_name(contents.step));
    Ok(SavedCheckpoint { step: contents.step, path, bytes, pruned_steps, warnings })
}

fn check_options(options: &SaveOptions) -> Result<(), CheckpointError> {
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

/// Everything that can be wrong with the tensors, before a byte is written.
fn check_tensors(tensors: &[TensorView<'_>]) -> Result<(), CheckpointError> {
    let mut seen = HashSet::new();
    for tensor in tensors {
        let (section, dtype) = (tensor.section, tensor.dtype);
        let name = || tensor.name.to_string();
        if tensor.name.is_empty() || tensor.name == RESERVED_NAME {
            return Err(CheckpointError::InvalidName { name: name() });
        }
        if !seen.insert((section, tensor.name)) {
            return Err(CheckpointError::DuplicateTensor { section, name: name() });
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

/// The lock file, and whether this file system has locks at all.
struct FolderLock {
    /// Unlocked when it is closed.
    _file: File,
    held: bool,
}

fn lock_folder(root: &Path, wait: Duration) -> Result<FolderLock, CheckpointError> {
    let path = root.join(".lock");
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(CheckpointError::io("write", &path))?;
    let begun = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(FolderLock { _file: file, held: true }),
            Err(TryLockError::WouldBlock) if begun.elapsed() < wait => {
                thread::sleep(Duration::from_millis(20));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(CheckpointError::WriterBusy {
                    root: root.to_path_buf(),
                    waited_s: wait.as_secs(),
                });
            }
            // Some network file systems are mounted without locks. Refusing to save there would
            // be worse than leaving the leftovers of a killed run.
            Err(TryLockError::Error(_)) => return Ok(FolderLock { _file: file, held: false }),
        }
    }
}

/// Clears what dead writers left. Call it only with the lock held.
fn remove_leftovers<I: Io>(
    io: &I,
    root: &Path,
    warnings: &mut Vec<String>,
) -> Result<(), CheckpointError> {
    for name in entry_names(root)? {
        let Some(FolderName::Aside { kind, step, .. }) = FolderName::parse(&name) else {
            continue;
        };
        let path = root.join(&name);
        let published = root.join(step_folder_name(step));
        let outcome = if kind == Aside::Replaced && !published.exists() {
            // Its successor never came: it is the checkpoint of that step again.
            io.rename(&path, &published)
        } else {
            io.remove_dir_all(&path)
        };
        if let Err(error) = outcome {
            warnings.push(format!("cannot clear `{}`: {error}", path.display()));
        }
    }
    Ok(())
}

/// Writes the whole checkpoint into `folder` and to the disk; its size in bytes.
fn write_aside<I: Io>(
    io: &I,
    folder: &Path,
    contents: &CheckpointContents<'_>,
    options: &SaveOptions,
) -> Result<u64, CheckpointError> {
    io.create_dir(folder).map_err(CheckpointError::io("create", folder))?;
    let mut manifest = Manifest {
        format_version: FORMAT_VERSION,
        step: contents.step,
        plan: contents.plan.clone(),
        policy: contents.policy.clone(),
        guards: contents.guards.clone(),
        rng: contents.rng.clone(),
        data_position: contents.data_position.clone(),
        run: contents.run.clone(),
        files: Vec::new(),
        tensors: Vec::new(),
    };
    for section in Section::ALL {
        let shards = split_section(&contents.tensors, section, options.shard_bytes_max);
        for (index, shard) in shards.iter().enumerate() {
            let name = format!("{section}-{:05}.safetensors", index + 1);
            write_shard(io, folder, name, shard, &mut manifest)?;
        }
    }
    let mut bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();

    let manifest_path = folder.join(MANIFEST_FILE);
    let json = serde_json::to_vec(&manifest).map_err(|error| CheckpointError::ManifestInvalid {
        path: manifest_path.clone(),
        detail: error.to_string(),
    })?;
    let mut file = HashingFile::create(io, manifest_path)?;
    file.append(&json, |_| {})?;
    let digest = file.finish()?;
    bytes += digest.bytes;

    let mut file = HashingFile::create(io, folder.join(MANIFEST_CHECKSUM_FILE))?;
    file.append(format!("{}\n", digest.blake3).as_bytes(), |_| {})?;
    bytes += file.finish()?.bytes;

    io.sync_dir(folder).map_err(CheckpointError::io("sync", folder))?;
    Ok(bytes)
}

/// The tensors of one section in shards of at most `bytes_max`, widest elements first, so that
/// each tensor is aligned to its elements.
fn split_section<'t, 'a>(
    tensors: &'t [TensorView<'a>],
    section: Section,
    bytes_max: u64,
) -> Vec<Vec<&'t TensorView<'a>>> {
    let mut members: Vec<_> = tensors.iter().filter(|tensor| tensor.section == section).collect();
    members.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.element_bytes()));
    let mut shards: Vec<Vec<_>> = Vec::new();
    let mut shard_bytes = 0;
    for tensor in members {
        let bytes = tensor.data.len() as u64;
        match shards.last_mut() {
            Some(shard) if shard_bytes + bytes <= bytes_max => {
                shard.push(tensor);
                shard_bytes += bytes;
            }
            _ => {
                shards.push(vec![tensor]);
                shard_bytes = bytes;
            }
        }
    }
    shards
}

/// Writes one shard and enters it into the manifest.
fn write_shard<I: Io>(
    io: &I,
    folder: &Path,
    name: String,
    tensors: &[&TensorView<'_>],
    manifest: &mut Manifest,
) -> Result<(), CheckpointError> {
    let path = folder.join(&name);
    let header: Vec<_> = tensors
        .iter()
        .map(|tensor| HeaderTensor {
            name: tensor.name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: tensor.data.len(),
        })
        .collect();
    let header = header_bytes(&header)
        .map_err(|detail| CheckpointError::ManifestInvalid { path: path.clone(), detail })?;
    let mut begin = header.len() as u64;
    let mut file = HashingFile::create(io, path)?;
    file.append(&header, |_| {})?;
    for tensor in tensors {
        let mut hasher = blake3::Hasher::new();
        file.append(tensor.data, |piece| {
            hasher.update(piece);
        })?;
        let bytes = tensor.data.len() as u64;
        manifest.tensors.push(TensorEntry {
            name: tensor.name.to_string(),
            section: tensor.section,
            dtype: tensor.dtype,
            global_shape: tensor.shape.clone(),
            global_offset: vec![0; tensor.shape.len()],
            shape: tensor.shape.clone(),
            file: name.clone(),
            begin,
            bytes,
            blake3: hasher.finalize().to_hex().to_string(),
        });
        begin += bytes;
    }
    let digest = file.finish()?;
    manifest.files.push(FileEntry { name, bytes: digest.bytes, blake3: digest.blake3 });
    Ok(())
}

/// Gives the finished folder its name.
fn publish<I: Io>(
    io: &I,
    root: &Path,
    temporary: &Path,
    step: u64,
    pid: u32,
) -> Result<(), CheckpointError> {
    let published = root.join(step_folder_name(step));
    let replaced = root.join(Aside::Replaced.folder_name(step, pid));
    let replaces = published.exists();
    if replaces {
        io.rename(&published, &replaced).map_err(CheckpointError::io("rename", &published))?;
    }
    if let Err(cause) = io.rename(temporary, &published) {
        if replaces {
            // If this fails too, the listing still finds it aside, and the next save puts it back.
            let _ = io.rename(&replaced, &published);
        }
        return Err(CheckpointError::io("rename", temporary)(cause));
    }
    io.sync_dir(root).map_err(CheckpointError::io("sync", root))?;
    if replaces {
        // Left for the next save if it cannot be removed now: it is no longer listed.
        let _ = io.remove_dir_all(&replaced);
    }
    Ok(())
}

/// Removes the oldest checkpoints up to the one just saved, but `keep_last`. Nothing that fails
/// here harms the new one.
fn prune<I: Io>(
    io: &I,
    root: &Path,
    just_saved: u64,
    pid: u32,
    keep_last: Option<usize>,
) -> (Vec<u64>, Vec<String>) {
    let (mut pruned, mut warnings) = (Vec::new(), Vec::new());
    let Some(keep_last) = keep_last else { return (pruned, warnings) };
    let mut entries = match list(root) {
        Ok(entries) => entries,
        Err(error) => return (pruned, vec![error.to_string()]),
    };
    entries.retain(|entry| entry.step <= just_saved);
    let surplus = entries.len().saturating_sub(keep_last);
    for entry in entries.iter().take(surplus) {
        let aside = root.join(Aside::Pruned.folder_name(entry.step, pid));
        let outcome = io.rename(&entry.path, &aside).and_then(|()| {
            pruned.push(entry.step);
            io.remove_dir_all(&aside)
        });
        if let Err(error) = outcome {
            warnings.push(format!("cannot remove `{}`: {error}", entry.path.display()));
        }
    }
    (pruned, warnings)
}

/// A full disk has a message of its own.
fn name_full_disk(error: CheckpointError, contents: &CheckpointContents<'_>) -> CheckpointError {
    match error {
        CheckpointError::Io { path, cause, .. }
            if matches!(
                cause.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
            ) =>
        {
            let bytes_needed = contents.tensors.iter().map(|tensor| tensor.data.len() as u64).sum();
            CheckpointError::NoSpace { path, step: contents.step, bytes_needed }
        }
        other => other,
    }
}

#[cfg(test)]
#[path = "save_tests.rs"]
mod tests;
