//! Where a model goes, complete or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::QuantizeFileError;
use super::safetensors::{self, Model, NewTensor};

/// The output of a run, in a folder beside its place until it is complete. Dropped before that, the
/// folder goes and the place is untouched.
pub(super) struct Output<'a> {
    path: &'a Path,
    /// The folder that the files will lie in.
    folder: PathBuf,
    partial: TempDir,
    is_folder: bool,
}

impl<'a> Output<'a> {
    /// Refuses an output that is there, unless `force`, and one that is the input.
    pub(super) fn begin(
        model: &Model,
        path: &'a Path,
        force: bool,
    ) -> Result<Self, QuantizeFileError> {
        if path.exists() {
            let same = |input: &Path| {
                let (input, output) = (fs::canonicalize(input), fs::canonicalize(path));
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
        let folder = if model.is_folder { path } else { parent }.to_path_buf();
        Ok(Self { path, folder, partial, is_folder: model.is_folder })
    }

    /// Where to write the file that is called `name` in the folder of the model.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        match (self.is_folder, self.path.file_name()) {
            (false, Some(name)) => self.partial.path().join(name),
            _ => self.partial.path().join(name),
        }
    }

    /// Moves the files to their place. What else lies there, such as a configuration, stays.
    pub(super) fn finish(
        self,
        model: &Model,
        index: &[(String, Vec<NewTensor>)],
    ) -> Result<(), QuantizeFileError> {
        let partial = self.partial.path();
        if model.has_index {
            safetensors::write_index(partial, index)?;
        }
        fs::create_dir_all(&self.folder).map_err(QuantizeFileError::io("create", &self.folder))?;
        for entry in fs::read_dir(partial).map_err(QuantizeFileError::io("read", partial))? {
            let entry = entry.map_err(QuantizeFileError::io("read", partial))?;
            let target = self.folder.join(entry.file_name());
            fs::rename(entry.path(), &target).map_err(QuantizeFileError::io("write", target))?;
        }
        Ok(())
    }
}
