//! A checkpoint being written: begun and published by one rank, filled by all ranks.
//!
//! | who | what |
//! |---|---|
//! | the first rank | [`CheckpointWriter::begin`]: locks, removes leftovers, creates a folder |
//! | every rank | [`write_shards`]: writes the rank's parts into separate files and syncs them |
//! | the first rank | [`CheckpointWriter::publish`]: checks parts, writes the manifest, renames |
//!
//! The caller communicates the folder and the written shards between the ranks. The folder of a
//! dropped writer is removed; the folder of a dead process is removed by the next writer.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::CheckpointError;
use crate::folder::{FolderName, HiddenFolder, entry_names, list, step_folder_name};
use crate::io::{DiskIo, HashingFile, Io};
use crate::manifest::{
    FORMAT_VERSION, FileEntry, MANIFEST_CHECKSUM_FILE, MANIFEST_FILE, Manifest, TensorEntry,
};
use crate::save::{
    CheckpointContents, SaveOptions, SavedCheckpoint, check_options, check_slices, name_full_disk,
};
use crate::shard::header_bytes;
use crate::tensor::{Section, SliceView};

/// Seconds that a writer waits for another writer to finish.
const LOCK_WAIT_S: u64 = 60;

/// An unpublished checkpoint, with the exclusive right to write into its folder of checkpoints.
///
/// ```
/// use deepwell_ckpt::{CheckpointContents, CheckpointWriter, SaveOptions};
/// use deepwell_ckpt::{SliceView, Section, TensorView};
///
/// # let root = tempfile::tempdir()?;
/// # let root = root.path();
/// let (options, step) = (SaveOptions::default(), 120);
/// let writer = CheckpointWriter::begin(root, step)?;
/// // Each rank has two of the four rows of `w`; they do this at the same time.
/// let write = |rank: u32, rows: [f32; 4]| {
///     let slice = SliceView {
///         view: TensorView::from_f32(Section::Master, "w", &[2, 2], &rows),
///         global_shape: vec![4, 2],
///         global_offset: vec![2 * rank as usize, 0],
///     };
///     deepwell_ckpt::write_shards(writer.folder(), Some(rank), &[slice], &options)
/// };
/// let shards = vec![write(0, [0.0, 1.0, 2.0, 3.0])?, write(1, [4.0, 5.0, 6.0, 7.0])?];
/// let saved = writer.publish(&CheckpointContents::new(step), shards, &options)?;
///
/// let mut whole = [0.0; 8];
/// let checkpoint = deepwell_ckpt::load(&saved.path)?;
/// checkpoint.read_f32_into(Section::Master, "w", &[4, 2], &mut whole)?;
/// assert_eq!(whole, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CheckpointWriter {
    /// `None` once published.
    temporary: Option<TemporaryFolder>,
    folder: PathBuf,
}

/// Files and tensors that a rank has written into a writer's folder, for the rank that publishes
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankShards {
    /// Files of the rank.
    pub files: Vec<FileEntry>,
    /// The parts of tensors in the files.
    pub tensors: Vec<TensorEntry>,
}

impl CheckpointWriter {
    /// Begins the checkpoint of a step in `root`, which is created if needed.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::WriterBusy`] if another process holds the folder for a minute, and
    /// [`CheckpointError::Io`].
    pub fn begin(root: &Path, step: u64) -> Result<CheckpointWriter, CheckpointError> {
        let temporary = TemporaryFolder::begin(&DiskIo, root, step)?;
        Ok(CheckpointWriter { folder: temporary.folder.clone(), temporary: Some(temporary) })
    }

    /// The folder for the ranks' shards.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Identifies the writer for [`CheckpointWriter::folder_of`] on another rank.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.temporary.as_ref().map_or(0, |temporary| temporary.pid)
    }

    /// Returns the folder of another rank's writer of a step in `root`.
    #[must_use]
    pub fn folder_of(root: &Path, step: u64, id: u32) -> PathBuf {
        root.join(HiddenFolder::Temporary.folder_name(step, id))
    }

    /// Publishes the checkpoint, once every rank has written the files in `shards`. `contents` has
    /// the JSON sections and no tensors.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Incomplete`] if parts are missing or overlap, or a file is missing or has
    /// another length; [`NoSpace`](CheckpointError::NoSpace) and [`Io`](CheckpointError::Io). After
    /// an error the earlier checkpoints are unchanged, and the writer's folder is removed.
    pub fn publish(
        mut self,
        contents: &CheckpointContents<'_>,
        shards: Vec<RankShards>,
        options: &SaveOptions,
    ) -> Result<SavedCheckpoint, CheckpointError> {
        check_options(options)?;
        let Some(temporary) = self.temporary.take() else { unreachable!("it is published once") };
        temporary.publish(&DiskIo, contents, shards, options)
    }
}

impl Drop for CheckpointWriter {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // Otherwise the next writer removes it.
            let _ = DiskIo.remove_dir_all(&temporary.folder);
        }
    }
}

/// Writes a rank's parts into separate files in the folder of a [`CheckpointWriter`], and syncs
/// them to disk. `rank` is `None` if there is only one rank. Memory: buffers of at most 1 MiB.
///
/// # Errors
///
/// As [`save`](crate::save), before anything is written and from the disk.
pub fn write_shards(
    folder: &Path,
    rank: Option<u32>,
    slices: &[SliceView<'_>],
    options: &SaveOptions,
) -> Result<RankShards, CheckpointError> {
    check_options(options)?;
    check_slices(slices)?;
    let bytes_needed = slices.iter().map(|slice| slice.view.data.len() as u64).sum();
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let step = match FolderName::parse(&name) {
        Some(FolderName::Hidden { step, .. } | FolderName::Step { step }) => step,
        None => 0,
    };
    write_slices(&DiskIo, folder, rank, slices, options)
        .map_err(|error| name_full_disk(error, step, bytes_needed))
}

/// Folder of an unpublished checkpoint, and the lock that its writer holds.
#[derive(Debug)]
pub(crate) struct TemporaryFolder {
    root: PathBuf,
    pub(crate) folder: PathBuf,
    step: u64,
    pid: u32,
    warnings: Vec<String>,
    _lock: FolderLock,
}

impl TemporaryFolder {
    pub(crate) fn begin<I: Io>(
        io: &I,
        root: &Path,
        step: u64,
    ) -> Result<TemporaryFolder, CheckpointError> {
        fs::create_dir_all(root).map_err(CheckpointError::io("create", root))?;
        let pid = std::process::id();
        let folder = CheckpointWriter::folder_of(root, step, pid);
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
            let _ = io.remove_dir_all(&folder);
        }
        io.create_dir(&folder).map_err(|cause| {
            // The folder may not exist: then there is nothing to remove.
            let _ = io.remove_dir_all(&folder);
            CheckpointError::io("create", &folder)(cause)
        })?;
        Ok(TemporaryFolder { root: root.to_path_buf(), folder, step, pid, warnings, _lock: lock })
    }

    /// Removes the folder, after an error.
    pub(crate) fn discard<I: Io>(&self, io: &I) {
        // If the folder was already renamed, there is nothing to remove.
        let _ = io.remove_dir_all(&self.folder);
    }

    pub(crate) fn publish<I: Io>(
        mut self,
        io: &I,
        contents: &CheckpointContents<'_>,
        shards: Vec<RankShards>,
        options: &SaveOptions,
    ) -> Result<SavedCheckpoint, CheckpointError> {
        let named = self.finish(io, contents, shards).and_then(|bytes| {
            publish(io, &self.root, &self.folder, self.step, self.pid).map(|()| bytes)
        });
        let bytes = named.inspect_err(|_| self.discard(io))?;
        let keep_last = options.keep_last;
        let (pruned_steps, warnings) = prune(io, &self.root, self.step, self.pid, keep_last);
        self.warnings.extend(warnings);
        let path = self.root.join(step_folder_name(self.step));
        Ok(SavedCheckpoint { step: self.step, path, bytes, pruned_steps, warnings: self.warnings })
    }

    /// Writes the manifest of all shards; returns the total bytes of all files.
    fn finish<I: Io>(
        &self,
        io: &I,
        contents: &CheckpointContents<'_>,
        shards: Vec<RankShards>,
    ) -> Result<u64, CheckpointError> {
        let folder = &self.folder;
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
        for RankShards { files, tensors } in shards {
            manifest.files.extend(files);
            manifest.tensors.extend(tensors);
        }
        let incomplete = |detail| CheckpointError::Incomplete { step: contents.step, detail };
        manifest.check_consistency().map_err(incomplete)?;
        manifest.check_lengths(folder).map_err(|error| incomplete(error.to_string()))?;
        let mut bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();

        let manifest_path = folder.join(MANIFEST_FILE);
        let json =
            serde_json::to_vec(&manifest).map_err(|error| CheckpointError::ManifestInvalid {
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
}

/// Writes the parts of one rank; `rank` is `None` for a checkpoint written by a single rank.
pub(crate) fn write_slices<I: Io>(
    io: &I,
    folder: &Path,
    rank: Option<u32>,
    slices: &[SliceView<'_>],
    options: &SaveOptions,
) -> Result<RankShards, CheckpointError> {
    let mut written = RankShards { files: Vec::new(), tensors: Vec::new() };
    let of_rank = rank.map_or_else(String::new, |rank| format!("-r{rank:05}"));
    for section in Section::ALL {
        let shards = split_section(slices, section, options.shard_bytes_max);
        for (index, shard) in shards.iter().enumerate() {
            let name = format!("{section}{of_rank}-{:05}.safetensors", index + 1);
            write_shard(io, folder, name, shard, &mut written)?;
        }
    }
    Ok(written)
}

/// Splits the tensors of one section into shards of at most `bytes_max`, widest elements first, so
/// that each tensor is aligned to its element size.
fn split_section<'t, 'a>(
    slices: &'t [SliceView<'a>],
    section: Section,
    bytes_max: u64,
) -> Vec<Vec<&'t SliceView<'a>>> {
    let mut members: Vec<_> = slices.iter().filter(|slice| slice.view.section == section).collect();
    members.sort_by_key(|slice| std::cmp::Reverse(slice.view.dtype.element_bytes()));
    let mut shards: Vec<Vec<_>> = Vec::new();
    let mut shard_bytes = 0;
    for slice in members {
        let bytes = slice.view.data.len() as u64;
        match shards.last_mut() {
            Some(shard) if shard_bytes + bytes <= bytes_max => {
                shard.push(slice);
                shard_bytes += bytes;
            }
            _ => {
                shards.push(vec![slice]);
                shard_bytes = bytes;
            }
        }
    }
    shards
}

/// Writes a shard and records the shard in `written`.
fn write_shard<I: Io>(
    io: &I,
    folder: &Path,
    name: String,
    slices: &[&SliceView<'_>],
    written: &mut RankShards,
) -> Result<(), CheckpointError> {
    let path = folder.join(&name);
    let mut entries: Vec<TensorEntry> = slices
        .iter()
        .map(|slice| TensorEntry {
            name: slice.view.name.to_string(),
            section: slice.view.section,
            dtype: slice.view.dtype,
            global_shape: slice.global_shape.clone(),
            global_offset: slice.global_offset.clone(),
            shape: slice.view.shape.clone(),
            file: name.clone(),
            begin: 0,
            bytes: slice.view.data.len() as u64,
            blake3: String::new(),
        })
        .collect();
    let names: Vec<String> = entries.iter().map(TensorEntry::name_in_file).collect();
    let tensors = names
        .iter()
        .zip(slices)
        .map(|(name, SliceView { view, .. })| (name.as_str(), view.dtype, &view.shape[..]));
    let header = header_bytes(tensors)
        .map_err(|detail| CheckpointError::ManifestInvalid { path: path.clone(), detail })?;
    let mut begin = header.len() as u64;
    let mut file = HashingFile::create(io, path)?;
    file.append(&header, |_| {})?;
    for (entry, slice) in entries.iter_mut().zip(slices) {
        let mut hasher = blake3::Hasher::new();
        file.append(slice.view.data, |piece| {
            hasher.update(piece);
        })?;
        entry.begin = begin;
        entry.blake3 = hasher.finalize().to_hex().to_string();
        begin += entry.bytes;
    }
    let digest = file.finish()?;
    written.files.push(FileEntry { name, bytes: digest.bytes, blake3: digest.blake3 });
    written.tensors.append(&mut entries);
    Ok(())
}

/// The lock file, and whether this file system supports locks.
#[derive(Debug)]
pub(crate) struct FolderLock {
    /// Closing the file releases the lock.
    _file: File,
    pub(crate) held: bool,
}

pub(crate) fn lock_folder(root: &Path, wait: Duration) -> Result<FolderLock, CheckpointError> {
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
            // Some network file systems are mounted without locks. Refusing to save there would be
            // worse than leaving the folders of a killed run.
            Err(TryLockError::Error(_)) => return Ok(FolderLock { _file: file, held: false }),
        }
    }
}

/// Removes the folders of dead writers. The lock must be held.
fn remove_leftovers<I: Io>(
    io: &I,
    root: &Path,
    warnings: &mut Vec<String>,
) -> Result<(), CheckpointError> {
    for name in entry_names(root)? {
        let Some(FolderName::Hidden { kind, step, .. }) = FolderName::parse(&name) else {
            continue;
        };
        let path = root.join(&name);
        let published = root.join(step_folder_name(step));
        let outcome = if kind == HiddenFolder::Replaced && !published.exists() {
            // The replacement was never published: restore the previous checkpoint of the step.
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

/// Renames the finished folder into place.
fn publish<I: Io>(
    io: &I,
    root: &Path,
    temporary: &Path,
    step: u64,
    pid: u32,
) -> Result<(), CheckpointError> {
    let published = root.join(step_folder_name(step));
    let replaced = root.join(HiddenFolder::Replaced.folder_name(step, pid));
    let replaces = published.exists();
    if replaces {
        io.rename(&published, &replaced).map_err(CheckpointError::io("rename", &published))?;
    }
    if let Err(cause) = io.rename(temporary, &published) {
        if replaces {
            // If this fails too, listings still find the folder, and the next save restores it.
            let _ = io.rename(&replaced, &published);
        }
        return Err(CheckpointError::io("rename", temporary)(cause));
    }
    io.sync_dir(root).map_err(CheckpointError::io("sync", root))?;
    if replaces {
        // If this fails, the next save removes it: the folder is no longer listed.
        let _ = io.remove_dir_all(&replaced);
    }
    Ok(())
}

/// Removes the oldest checkpoints up to the one just saved, except the last `keep_last`. Failures
/// do not affect the new checkpoint.
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
        let hidden = root.join(HiddenFolder::Pruned.folder_name(entry.step, pid));
        let outcome = io.rename(&entry.path, &hidden).and_then(|()| {
            pruned.push(entry.step);
            io.remove_dir_all(&hidden)
        });
        if let Err(error) = outcome {
            warnings.push(format!("cannot remove `{}`: {error}", entry.path.display()));
        }
    }
    (pruned, warnings)
}
