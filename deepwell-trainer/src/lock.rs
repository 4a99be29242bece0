//! One process owns an output folder.
//!
//! The lock is the operating system's (`flock`) on a file in the folder. It ends with its process,
//! however that ends, so that what a dead process left never blocks. The file says who holds it,
//! for the message to whoever comes second.

use std::fmt;
use std::fs::{File, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::TrainError;
use crate::clock::utc_now;

/// Name of the lock file in an output folder.
pub const LOCK_FILE: &str = ".deepwell.lock";

/// An output folder that belongs to this value until it is dropped.
///
/// ```
/// use deepwell_trainer::lock::OutputLock;
///
/// let folder = tempfile::tempdir().unwrap();
/// let held = OutputLock::acquire(folder.path())?;
/// let refused = OutputLock::acquire(folder.path()).unwrap_err().to_string();
/// assert!(refused.contains(&format!("process {}", std::process::id())), "{refused}");
/// drop(held);
/// OutputLock::acquire(folder.path())?;
/// # Ok::<(), deepwell_trainer::TrainError>(())
/// ```
#[derive(Debug)]
pub struct OutputLock {
    /// Unlocked when it is closed.
    file: File,
    path: PathBuf,
}

/// Who holds a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockHolder {
    /// Its process.
    pub pid: u32,
    /// The machine's name.
    pub host: String,
    /// Since when, `2026-01-31T23:59:59Z`.
    pub since: String,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} on `{}`, since {}", self.pid, self.host, self.since)
    }
}

impl OutputLock {
    /// Takes the folder, which is made if need be.
    ///
    /// On a file system without locks it is taken unchecked, with a warning in the log.
    ///
    /// # Errors
    /// [`TrainError::Locked`] naming the process that holds it; a folder that cannot be written to.
    pub fn acquire(folder: &Path) -> Result<OutputLock, TrainError> {
        std::fs::create_dir_all(folder).map_err(TrainError::io(folder))?;
        let path = folder.join(LOCK_FILE);
        let mut options = File::options();
        options.create(true).truncate(false).read(true).write(true);
        let mut file = options.open(&path).map_err(TrainError::io(&path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = read_holder(&mut file);
                return Err(TrainError::Locked { folder: folder.to_path_buf(), holder });
            }
            // Some network file systems are mounted without locks. Refusing to train there would
            // be worse than not seeing a second run.
            Err(TryLockError::Error(error)) => {
                tracing::warn!("`{}` has no locks: {error}", folder.display());
            }
        }
        let holder = LockHolder {
            pid: std::process::id(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            since: utc_now(),
        };
        let mut lock = OutputLock { file, path };
        lock.sign(&holder).map_err(TrainError::io(&lock.path))?;
        Ok(lock)
    }

    fn sign(&mut self, holder: &LockHolder) -> io::Result<()> {
        let text = serde_json::to_string(holder).expect("a holder is plain data");
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())
    }
}

/// What the file says; nothing while its owner is about to write it.
fn read_holder(file: &mut File) -> Option<LockHolder> {
    let mut text = String::new();
    file.read_to_string(&mut text).ok()?;
    serde_json::from_str(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_of_a_dead_process_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let left = [
            r#"{"pid":1,"host":"elsewhere","since":"2026-01-31T23:59:59Z"}"#.to_string(),
            "x".repeat(5000),
            String::new(),
        ];
        for text in left {
            std::fs::write(folder.path().join(LOCK_FILE), text).unwrap();
            let lock = OutputLock::acquire(folder.path()).unwrap();
            let holder = read_holder(&mut File::open(&lock.path).unwrap()).unwrap();
            assert_eq!(holder.pid, std::process::id());
        }
    }

    #[test]
    fn whoever_comes_second_is_told_who_holds_it() {
        let folder = tempfile::tempdir().unwrap();
        let inner = folder.path().join("runs/a");
        let held = OutputLock::acquire(&inner).unwrap();
        let error = OutputLock::acquire(&inner).unwrap_err();
        let TrainError::Locked { holder: Some(holder), .. } = &error else { panic!("{error}") };
        assert_eq!(
            error.to_string(),
            format!(
                "`{}` belongs to another run: {holder}\nhint: wait for it or stop it, or let \
                 `--out` name another folder",
                inner.display()
            )
        );
        // Another folder is free, and this one is once its owner is gone.
        OutputLock::acquire(folder.path()).unwrap();
        drop(held);
        OutputLock::acquire(&inner).unwrap();
    }
}
