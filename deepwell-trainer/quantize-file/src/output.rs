//! Output of a model, complete or not at all.
//!
//! All files are first written to a temporary folder and synced. A new output folder then appears
//! with one rename. In an existing folder, files are renamed one by one, and a reader finds at each
//! moment the former model, the new model, or none:
//!
//! 1. an index that will be replaced is removed, because its shards change under their names;
//! 2. the shards are renamed; without an index no reader finds them;
//! 3. the index, or the single file of a model without an index, is renamed;
//! 4. the other form of the former model, an index or a single file, is removed.
//!
//! The folder is synced after each of these steps.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::QuantizeFileError;
use super::safetensors::{self, INDEX_FILE, Model, NewTensor, SINGLE_FILE};

/// Name of the model's folder in the temporary folder.
const FILES: &str = "model";

/// The output of a run, in a temporary folder next to its destination until complete. An early drop
/// removes the temporary folder and leaves the destination untouched.
pub(super) struct Output<'a> {
    path: &'a Path,
    /// The destination folder of the files.
    folder: PathBuf,
    /// In the folder of `path`, so that a rename is sufficient.
    partial: TempDir,
    is_folder: bool,
}

impl<'a> Output<'a> {
    /// Rejects an existing output, unless `force`, and an output that is the input.
    pub(super) fn begin(
        model: &Model,
        path: &'a Path,
        force: bool,
    ) -> Result<Self, QuantizeFileError> {
        if path.exists() {
            let same = |input: &Path| {
                let input = fs::canonicalize(input);
                let output = fs::canonicalize(path);
                matches!((input, output), (Ok(input), Ok(output)) if input == output)
            };
            let mut folders = model.files.iter().filter_map(|(input, _)| input.parent());
            if model.files.iter().any(|(input, _)| same(input))
                || (model.is_folder && folders.any(same))
            {
                return Err(QuantizeFileError::SameFile { path: path.to_path_buf() });
            }
            if !force {
                return Err(QuantizeFileError::Exists { path: path.to_path_buf() });
            }
        }
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        fs::create_dir_all(parent).map_err(QuantizeFileError::io("create", parent))?;
        let partial = tempfile::Builder::new()
            .prefix(".deepwell-quantize-")
            .tempdir_in(parent)
            .map_err(QuantizeFileError::io("write to", parent))?;
        // A temporary folder is private to its user; its subfolder has the default permissions.
        let files = partial.path().join(FILES);
        fs::create_dir(&files).map_err(QuantizeFileError::io("create", &files))?;
        let folder = if model.is_folder { path } else { parent }.to_path_buf();
        Ok(Self { path, folder, partial, is_folder: model.is_folder })
    }

    /// Path for writing the file with this `name` in the model's folder.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        match (self.is_folder, self.path.file_name()) {
            (false, Some(name)) => self.files().join(name),
            _ => self.files().join(name),
        }
    }

    fn files(&self) -> PathBuf {
        self.partial.path().join(FILES)
    }

    /// Moves the files to their destination. Other files there, such as a configuration, are kept.
    pub(super) fn finish(
        self,
        model: &Model,
        index: &[(String, Vec<NewTensor>)],
    ) -> Result<(), QuantizeFileError> {
        if model.has_index {
            safetensors::write_index(&self.files(), index)?;
        }
        self.publish(&RealDisk)
    }

    fn publish(&self, disk: &dyn Disk) -> Result<(), QuantizeFileError> {
        let (files, folder) = (self.files(), &self.folder);
        let sync = |path: &Path| disk.sync(path).map_err(QuantizeFileError::io("sync", path));
        let mut names = Vec::new();
        for entry in fs::read_dir(&files).map_err(QuantizeFileError::io("read", &files))? {
            let entry = entry.map_err(QuantizeFileError::io("read", &files))?;
            sync(&entry.path())?;
            names.push(entry.file_name());
        }
        sync(&files)?;
        if self.is_folder && !folder.exists() {
            disk.rename(&files, folder).map_err(QuantizeFileError::io("write", folder))?;
            return sync(folder.parent().filter(|p| *p != Path::new("")).unwrap_or(Path::new(".")));
        }
        let remove = |name: &str| {
            let path = folder.join(name);
            if !path.exists() {
                return Ok(());
            }
            disk.remove(&path).map_err(QuantizeFileError::io("replace", &path))?;
            sync(folder)
        };
        let has = |name: &str| names.iter().any(|other| other == name);
        let has_index = self.is_folder && has(INDEX_FILE);
        if has_index {
            remove(INDEX_FILE)?;
        }
        let (last, first): (Vec<_>, Vec<_>) =
            names.iter().partition(|name| !has_index || *name == INDEX_FILE);
        for names in [first, last].iter().filter(|names| !names.is_empty()) {
            for name in names {
                let target = folder.join(name);
                disk.rename(&files.join(name), &target)
                    .map_err(QuantizeFileError::io("write", &target))?;
            }
            sync(folder)?;
        }
        let former = if has_index { SINGLE_FILE } else { INDEX_FILE };
        if self.is_folder && !has(former) { remove(former) } else { Ok(()) }
    }
}

/// The file operations of the protocol above, so that a test can fail each of them.
trait Disk {
    fn sync(&self, path: &Path) -> io::Result<()>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    fn remove(&self, path: &Path) -> io::Result<()>;
}

struct RealDisk;

impl Disk for RealDisk {
    fn sync(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
