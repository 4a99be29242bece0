//! A folder of checkpoints: complete, damaged, and temporary entries.
//!
//! | entry | meaning |
//! |---|---|
//! | `step-00000120` | a published checkpoint |
//! | `.replaced-step-00000120-4711` | previous checkpoint of a step that is being saved again |
//! | `.tmp-step-00000120-4711` | being written by process 4711, or left by its death |
//! | `.pruned-step-00000100-4711` | being removed |
//! | `.lock` | held by the writer |

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::error::CheckpointError;
use crate::manifest::{MANIFEST_CHECKSUM_FILE, MANIFEST_FILE, Manifest};

/// A complete checkpoint in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CheckpointEntry {
    /// Training step after which the checkpoint was written.
    pub step: u64,
    /// Folder of the checkpoint.
    pub path: PathBuf,
}

/// A published checkpoint that is damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DamagedCheckpoint {
    /// Training step in the folder name.
    pub step: u64,
    /// Folder of the checkpoint.
    pub path: PathBuf,
    /// Description of the damage.
    pub reason: String,
}

/// All checkpoints in a folder.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Listing {
    /// Complete checkpoints, by ascending step.
    pub complete: Vec<CheckpointEntry>,
    /// Checkpoints with a damaged manifest, or with a shard that is missing or has another length.
    pub damaged: Vec<DamagedCheckpoint>,
}

/// The complete checkpoints in `root`, by ascending step; empty if the folder does not exist.
///
/// A checkpoint is complete if its manifest is intact and every shard exists with its full length.
/// The bytes of the shards are not read, unlike in [`verify`](crate::verify).
///
/// # Errors
///
/// [`CheckpointError::Io`] if `root` cannot be read. A damaged checkpoint is not an error: it is
/// omitted here and reported by [`scan`].
pub fn list(root: &Path) -> Result<Vec<CheckpointEntry>, CheckpointError> {
    Ok(scan(root)?.complete)
}

/// The complete checkpoint with the highest step, if there is one.
///
/// # Errors
///
/// [`CheckpointError::Io`] if `root` cannot be read.
pub fn latest(root: &Path) -> Result<Option<CheckpointEntry>, CheckpointError> {
    Ok(scan(root)?.complete.pop())
}

/// Like [`list`], with the damaged checkpoints as well.
///
/// # Errors
///
/// [`CheckpointError::Io`] if `root` cannot be read.
pub fn scan(root: &Path) -> Result<Listing, CheckpointError> {
    let names = entry_names(root)?;
    let mut candidates: Vec<(u64, String)> = Vec::new();
    for name in &names {
        match FolderName::parse(name) {
            Some(FolderName::Step { step }) => candidates.push((step, name.clone())),
            // A kill between the two renames of a replacement leaves only the previous checkpoint.
            Some(FolderName::Hidden { kind: HiddenFolder::Replaced, step, .. })
                if !names.contains(&step_folder_name(step)) =>
            {
                candidates.push((step, name.clone()));
            }
            _ => {}
        }
    }
    candidates.sort();
    let mut listing = Listing::default();
    for (step, name) in candidates {
        let path = root.join(name);
        match Manifest::read(&path) {
            Ok(manifest) if manifest.step == step => {
                listing.complete.push(CheckpointEntry { step, path });
            }
            Ok(manifest) => {
                let reason = format!("its manifest is of step {}", manifest.step);
                listing.damaged.push(DamagedCheckpoint { step, path, reason });
            }
            Err(error) => {
                let reason = error.to_string();
                listing.damaged.push(DamagedCheckpoint { step, path, reason });
            }
        }
    }
    Ok(listing)
}

/// Whether a folder is a checkpoint, complete or damaged: by its name, its manifest, or the
/// checksum of the manifest.
pub fn is_checkpoint(path: &Path) -> bool {
    // The path `.` has no file name.
    let whole = path.canonicalize();
    let name = whole.as_deref().unwrap_or(path).file_name().and_then(|name| name.to_str());
    let is_published = |name: &str| {
        let kind = FolderName::parse(name);
        let is_former = |kind: &FolderName| {
            matches!(kind, FolderName::Hidden { kind: HiddenFolder::Replaced, .. })
        };
        kind.is_some_and(|kind| matches!(kind, FolderName::Step { .. }) || is_former(&kind))
    };
    let has = |file: &str| path.join(file).is_file();
    path.is_dir()
        && (name.is_some_and(is_published) || has(MANIFEST_FILE) || has(MANIFEST_CHECKSUM_FILE))
}

/// Names of the entries of a folder; empty if it does not exist. Names that are not UTF-8 are not
/// from this crate and are skipped.
pub(crate) fn entry_names(root: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(CheckpointError::io("list", root))?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io("list", root))?;
        if let Ok(name) = entry.file_name().into_string() {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Returns a name such as `step-00000120`.
pub(crate) fn step_folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// State of a folder that is not published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HiddenFolder {
    /// Being written.
    Temporary,
    /// Being replaced by a newer checkpoint of the same step.
    Replaced,
    /// Being removed.
    Pruned,
}

impl HiddenFolder {
    const ALL: [HiddenFolder; 3] =
        [HiddenFolder::Temporary, HiddenFolder::Replaced, HiddenFolder::Pruned];

    fn prefix(self) -> &'static str {
        match self {
            HiddenFolder::Temporary => ".tmp-",
            HiddenFolder::Replaced => ".replaced-",
            HiddenFolder::Pruned => ".pruned-",
        }
    }

    /// Returns a name such as `.tmp-step-00000120-4711`.
    pub(crate) fn folder_name(self, step: u64, pid: u32) -> String {
        format!("{}{}-{pid}", self.prefix(), step_folder_name(step))
    }
}

/// A folder name of this crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FolderName {
    /// A published checkpoint.
    Step { step: u64 },
    /// An unpublished folder.
    Hidden { kind: HiddenFolder, step: u64, pid: u32 },
}

impl FolderName {
    pub(crate) fn parse(name: &str) -> Option<FolderName> {
        let parsed = match name.strip_prefix("step-") {
            Some(step) => FolderName::Step { step: step.parse().ok()? },
            None => {
                let kind =
                    HiddenFolder::ALL.into_iter().find(|kind| name.starts_with(kind.prefix()))?;
                let rest = name.strip_prefix(kind.prefix())?.strip_prefix("step-")?;
                let (step, pid) = rest.split_once('-')?;
                FolderName::Hidden { kind, step: step.parse().ok()?, pid: pid.parse().ok()? }
            }
        };
        // Accepts canonical names only: no sign, no missing or extra zeros.
        (parsed.name() == name).then_some(parsed)
    }

    fn name(self) -> String {
        match self {
            FolderName::Step { step } => step_folder_name(step),
            FolderName::Hidden { kind, step, pid } => kind.folder_name(step, pid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_names() {
        let check = |name: &str, expected: Option<FolderName>| {
            assert_eq!(FolderName::parse(name), expected, "{name}");
        };
        let hidden = |kind, step, pid| Some(FolderName::Hidden { kind, step, pid });
        check("step-00000120", Some(FolderName::Step { step: 120 }));
        check("step-123456789", Some(FolderName::Step { step: 123_456_789 }));
        check(".tmp-step-00000120-4711", hidden(HiddenFolder::Temporary, 120, 4711));
        check(".replaced-step-00000000-1", hidden(HiddenFolder::Replaced, 0, 1));
        check(".pruned-step-00000007-4711", hidden(HiddenFolder::Pruned, 7, 4711));
        for foreign in [
            "step-120",
            "step-000000120",
            "step-+0000120",
            "step-",
            "step-0000012x",
            "step-99999999999999999999",
            ".tmp-step-00000120",
            ".tmp-step-00000120-x",
            "tmp-step-00000120-1",
            ".lock",
            "",
        ] {
            check(foreign, None);
        }
    }
}
