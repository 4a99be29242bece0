//! Writing a `tokenizer.json`: complete, or not at all.

use std::io::{self, Write};
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

use super::super::DataError;
use super::super::tokenizer::configured_eos;
use super::END_OF_TEXT;

/// Whether a tokenizer may be written to `path`.
pub(super) fn check(path: &Path, force: bool) -> Result<(), DataError> {
    if path.is_dir() {
        return Err(DataError::OutputIsFolder { path: path.to_owned() });
    }
    if path.exists() && !force {
        return Err(DataError::OutputExists { path: path.to_owned() });
    }
    // A device would be replaced, not written to.
    if path.exists() && !path.is_file() {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
        return Err(fail(path, source));
    }
    match configured_eos(path)? {
        Some(found) if found != END_OF_TEXT => {
            Err(DataError::OtherEndOfText { path: path.to_owned(), found })
        }
        _ => Ok(()),
    }
}

/// Creates the folder of `path` and a temporary file in it, so that an unwritable folder is
/// reported before the work.
pub(super) fn try_folder(path: &Path) -> Result<(), DataError> {
    aside(path).map(drop).map_err(|source| fail(path, source))
}

/// Writes and syncs a temporary file in the same folder, and renames it to `path`.
pub(super) fn write(path: &Path, text: &[u8], force: bool) -> Result<(), DataError> {
    let write = || {
        let mut file = aside(path)?;
        file.write_all(text)?;
        file.as_file().sync_all()?;
        Ok(file)
    };
    let file = write().map_err(|source| fail(path, source))?;
    let named = if force { file.persist(path) } else { file.persist_noclobber(path) };
    match named {
        Ok(_) => Ok(()),
        Err(error) if !force && error.error.kind() == io::ErrorKind::AlreadyExists => {
            Err(DataError::OutputExists { path: path.to_owned() })
        }
        Err(error) => Err(fail(path, error.error)),
    }
}

fn aside(path: &Path) -> io::Result<NamedTempFile> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder)?;
    let mut builder = Builder::new();
    builder.prefix(".tokenizer-");
    // Temporary files are private to their owner; a tokenizer should have the usual permissions.
    #[cfg(unix)]
    let mode = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o666);
    #[cfg(unix)]
    builder.permissions(mode);
    builder.tempfile_in(folder)
}

fn fail(path: &Path, source: io::Error) -> DataError {
    DataError::WriteTokenizer { path: path.to_owned(), source }
}
