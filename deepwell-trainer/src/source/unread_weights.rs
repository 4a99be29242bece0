//! Weights that lie in the folder of a named `config.json`.

use std::path::Path;

use deepwell_ir::capture::{CaptureError, WeightFiles};

/// Remark about unread weights next to a `config.json` that is named directly.
pub(super) fn unread_beside(config: &Path) -> Option<String> {
    let folder = config.parent()?;
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    match WeightFiles::find(folder) {
        Ok(Some(files)) => {
            let file = files.files.first()?;
            Some(format!("`{}` is not read, `{}` takes it", file.display(), folder.display()))
        }
        Err(CaptureError::UnreadWeights { found, .. }) => Some(format!("{found} is not read")),
        Err(CaptureError::WeightFile { path, .. } | CaptureError::NotFound { path, .. }) => {
            Some(format!("`{}` is not read", path.display()))
        }
        _ => None,
    }
}
