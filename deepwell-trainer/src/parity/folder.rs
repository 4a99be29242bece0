//! The output folder of a comparison: its lock, and the rules for a new comparison in a folder with
//! results.

use std::fs;
use std::path::{Path, PathBuf};

use super::options::RunKind;
use crate::lock::OutputLock;
use crate::{Start, TrainError};

/// Reports of a comparison and of an ablation. The folders of the seeds are in the same folder.
const REPORTS: [&str; 5] =
    ["report.json", "report.html", "metrics.jsonl", "ablation.json", "ablation.html"];

/// Name of a seed's folder.
pub(super) fn seed_folder(seed: u64) -> String {
    format!("seed-{seed}")
}

/// Locks `out` for a comparison and makes room in it, as `start` says.
///
/// # Errors
/// [`TrainError::Locked`]; [`TrainError::Results`] for a new comparison in a folder with another.
pub(super) fn claim(out: &Path, start: Start) -> Result<Claimed, TrainError> {
    let claimed = Claimed { lock: OutputLock::acquire(out)?, out: out.to_path_buf() };
    match start {
        Start::Resume | Start::ResumeChanged => rename_former(out)?,
        Start::New => {
            let found = results(out)?;
            if !found.is_empty() {
                let folder = out.to_path_buf();
                return Err(TrainError::Results { folder, run: None, found });
            }
        }
        Start::Overwrite => {
            for name in results(out)? {
                let path = out.join(&name);
                let deleted =
                    if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
                deleted.map_err(TrainError::io(&path))?;
            }
        }
    }
    Ok(claimed)
}

/// The output folder of a comparison. A drop without results of a run removes the lock and the
/// folders created for the comparison.
#[derive(Debug)]
pub(super) struct Claimed {
    lock: OutputLock,
    out: PathBuf,
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if results(&self.out).is_ok_and(|found| found.is_empty()) {
            self.lock.remove_made();
        }
    }
}

/// Earlier versions named the folder of a low-precision run `mxfp8` for every precision.
fn rename_former(out: &Path) -> Result<(), TrainError> {
    for name in results(out)? {
        let former = out.join(&name).join("mxfp8");
        let folder = RunKind::LowPrecision.name();
        let now = out.join(&name).join(folder);
        if former.exists() && !now.exists() {
            fs::rename(&former, &now).map_err(TrainError::io(&former))?;
        }
    }
    Ok(())
}

/// Names of a comparison's results in `out`.
fn results(out: &Path) -> Result<Vec<String>, TrainError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(out).map_err(TrainError::io(out))? {
        let name = entry.map_err(TrainError::io(out))?.file_name().to_string_lossy().into_owned();
        let seed = name.strip_prefix("seed-");
        let is_seed = seed.is_some_and(|seed| seed.parse::<u64>().is_ok());
        if is_seed || REPORTS.contains(&name.as_str()) {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_deleted_only_when_asked() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        drop(claim(out, Start::New).unwrap());
        for name in ["seed-3/bf16", "seed-3/mxfp8", "seed-x/mxfp8"] {
            fs::create_dir_all(out.join(name)).unwrap();
        }
        for name in ["report.json", "notes.txt"] {
            fs::write(out.join(name), "x").unwrap();
        }
        let error = claim(out, Start::New).unwrap_err();
        let TrainError::Results { found, .. } = &error else { panic!("{error}") };
        assert_eq!(found[..], ["report.json", "seed-3"]);
        drop(claim(out, Start::Resume).unwrap());
        let is_there = ["seed-3/low_precision", "seed-3/mxfp8", "seed-x/mxfp8"]
            .map(|name| out.join(name).exists());
        assert_eq!(is_there, [true, false, true], "runs of a former version are taken over");
        assert_eq!(results(out).unwrap().len(), 2);
        let lock = claim(out, Start::Overwrite).unwrap();
        assert_eq!(results(out).unwrap().len(), 0);
        assert!(out.join("notes.txt").exists() && out.join("seed-x").exists());
        assert!(matches!(claim(out, Start::Resume), Err(TrainError::Locked { .. })));
        drop(lock);
    }
}
