//! Resolves a path to a checkpoint.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use deepwell_ckpt::{is_checkpoint, scan};

use crate::output::note;

/// The folder for checkpoints inside a run's output folder.
const CHECKPOINTS_FOLDER: &str = "checkpoints";

/// Choice among several checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The newest loadable checkpoint.
    NewestComplete,
    /// The newest, damaged or not.
    Newest,
}

/// Returns the checkpoint at a path or, for a folder, the wanted one in it.
pub(crate) fn find(path: &Path, wanted: Wanted) -> Result<PathBuf> {
    if is_checkpoint(path) || !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let inner = path.join(CHECKPOINTS_FOLDER);
    let root = if inner.is_dir() { inner } else { path.to_path_buf() };
    let listing = scan(&root)?;
    for damaged in &listing.damaged {
        note(format_args!("`{}` is damaged: {}", damaged.path.display(), damaged.reason));
    }
    let complete = listing.complete.last().map(|entry| (entry.step, &entry.path));
    let damaged = listing.damaged.last().map(|entry| (entry.step, &entry.path));
    let newest = match wanted {
        Wanted::NewestComplete => complete,
        Wanted::Newest => complete.max(damaged),
    };
    match newest {
        Some((_, path)) => Ok(path.clone()),
        None if listing.damaged.is_empty() => bail!(
            "`{}`: expected a checkpoint or a folder of checkpoints, found neither\n\
             hint: a run writes its checkpoints to `{CHECKPOINTS_FOLDER}` in its output folder",
            path.display()
        ),
        None => bail!("`{}`: every checkpoint in it is damaged", root.display()),
    }
}
