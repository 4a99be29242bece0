//! Files that a reader never sees half written.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::TrainError;

/// Writes and syncs a temporary file, and renames it: a reader sees either the former file or the
/// new one.
pub(crate) fn write_atomically(path: &Path, text: &str) -> Result<(), TrainError> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let write = || {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".deepwell-");
        // A temporary file is private to its user; the result gets the usual permissions.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let mut file = builder.tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        file.persist(path).map_err(|error| error.error)?;
        if cfg!(unix) {
            File::open(folder)?.sync_all()?;
        }
        Ok(())
    };
    write().map_err(TrainError::io(path))
}
