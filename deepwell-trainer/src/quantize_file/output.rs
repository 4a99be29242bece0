//! Where a model goes, complete or not at all.

use std::fs;
use std::path::{Path, PathBuf};

use super::QuantizeFileError;
use super::safetensors::{self, Model, NewTensor};

/// Where a model goes: under another name until it is complete.
pub(super) struct Output<'a> {
    path: &'a Path,
    partial: PathBuf,
    is_folder: bool,
}

impl<'a> Output<'a> {
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
            let parents = model.files.iter().filter_map(|(input, _)| input.parent());
            if model.files.iter().any(|(input, _)| same(input))
                || (model.is_folder && parents.into_iter().any(same))
            {
                return Err(QuantizeFileError::SameFile { path: path.to_path_buf() });
            }
            if !force {
                return Err(QuantizeFileError::Exists { path: path.to_path_buf() });
            }
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let this = Self { path, partial: partial.into(), is_folder: model.is_folder };
        if model.is_folder {
            fs::create_dir_all(&this.partial)
                .map_err(QuantizeFileError::io("create", &this.partial))?;
        } else if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(QuantizeFileError::io("create", parent))?;
        }
        Ok(this)
    }

    /// Where the file goes that is called `name` in the folder of the model.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        if self.is_folder { self.partial.join(name) } else { self.partial.clone() }
    }

    /// Gives the output its name.
    pub(super) fn finish(
        self,
        model: &Model,
        index: &[(String, Vec<NewTensor>)],
    ) -> Result<(), QuantizeFileError> {
        if model.has_index {
            safetensors::write_index(&self.partial, index)?;
        }
        if self.is_folder && self.path.exists() {
            // Only what is written here is replaced: a folder may hold a configuration too.
            let entries = fs::read_dir(&self.partial)
                .map_err(QuantizeFileError::io("read", &self.partial))?;
            for entry in entries {
                let entry = entry.map_err(QuantizeFileError::io("read", &self.partial))?;
                let target = self.path.join(entry.file_name());
                fs::rename(entry.path(), &target)
                    .map_err(QuantizeFileError::io("write", target))?;
            }
            let partial = &self.partial;
            return fs::remove_dir(partial).map_err(QuantizeFileError::io("remove", partial));
        }
        fs::rename(&self.partial, self.path).map_err(QuantizeFileError::io("write", self.path))
    }
}
