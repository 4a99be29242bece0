//! One process owns an output folder.
//!
//! The lock is a lock of the operating system (`flock`) on a file in the folder. The lock ends with
//! its process, even after a crash, so that leftovers of a dead process never block. The file names
//! the holder, for the error message of a second process.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

mod holder;

pub use self::holder::LockHolder;
use crate::TrainError;
use crate::clock::utc_now;

/// Name of the lock file in an output folder.
pub const LOCK_FILE: &str = ".deepwell.lock";

/// An output folder locked until this value is dropped.
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
    /// Unlocked on close.
    file: File,
    path: PathBuf,
    /// Whether the file was made for this lock.
    is_new: bool,
    /// Folders created for the lock, the innermost first.
    made: Vec<PathBuf>,
}

/// Attempts to lock a file that other processes remove at the same time.
const ATTEMPTS_MAX: usize = 100;

impl OutputLock {
    /// Locks the folder, and creates it if needed.
    ///
    /// On a file system without locks the folder is used unlocked, with a warning in the log.
    ///
    /// # Errors
    /// [`TrainError::Locked`] names the process that holds the lock; [`TrainError::OutputFolder`]
    /// if the folder cannot be written.
    pub fn acquire(folder: &Path) -> Result<OutputLock, TrainError> {
        let path = folder.join(LOCK_FILE);
        let unusable = |path: &Path, source| {
            let path = path.to_path_buf();
            Err(TrainError::OutputFolder { path, source })
        };
        let mut attempts = 0;
        let (file, is_new, made) = loop {
            attempts += 1;
            let is_last = attempts == ATTEMPTS_MAX;
            let made: Vec<PathBuf> = missing(folder);
            if let Err(error) = fs::create_dir_all(folder) {
                return unusable(folder, error);
            }
            let (mut file, is_new) = match open(&path) {
                Ok(opened) => opened,
                // A run that never began has removed the file.
                Err(error) if error.kind() == ErrorKind::NotFound && !is_last => continue,
                Err(error) => return unusable(&path, error),
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let holder = read_holder(&mut file);
                    return Err(TrainError::Locked { folder: folder.to_path_buf(), holder });
                }
                // Some network file systems are mounted without locks. Refusing to train there
                // would be worse than missing a second run.
                Err(TryLockError::Error(error)) => {
                    tracing::warn!("`{}` has no locks: {error}", folder.display());
                }
            }
            if is_last || is_at(&file, &path) {
                break (file, is_new, made);
            }
        };
        let holder = LockHolder {
            pid: std::process::id(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            since: utc_now(),
        };
        let mut lock = OutputLock { file, path, is_new, made };
        lock.sign(&holder).map_err(TrainError::io(&lock.path))?;
        Ok(lock)
    }

    /// Removes everything created for this lock: the file, and empty folders.
    pub(crate) fn remove_made(&self) {
        // Files that cannot be removed stay, and do not block the folder.
        if self.is_new {
            let _ = fs::remove_file(&self.path);
        }
        self.made.iter().take_while(|folder| fs::remove_dir(folder).is_ok()).for_each(drop);
    }

    fn sign(&mut self, holder: &LockHolder) -> io::Result<()> {
        let text = serde_json::to_string(holder).expect("a holder is plain data");
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())
    }
}

/// Opens the file of a lock; returns whether the file is new.
fn open(path: &Path) -> io::Result<(File, bool)> {
    let mut options = File::options();
    options.read(true).write(true);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok((options.open(path)?, false)),
        opened => Ok((opened?, true)),
    }
}

/// Returns a folder and its missing parents, the innermost first.
fn missing(folder: &Path) -> Vec<PathBuf> {
    let is_missing = |path: &&Path| !path.as_os_str().is_empty() && !path.exists();
    folder.ancestors().take_while(is_missing).map(Path::to_path_buf).collect()
}

/// Whether an open file still has this name: the previous holder may have removed the file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let place = |found: fs::Metadata| (found.dev(), found.ino());
    let [open, named] = [file.metadata(), fs::metadata(path)].map(|found| found.ok().map(place));
    open.is_some() && open == named
}

#[cfg(not(unix))]
fn is_at(_file: &File, path: &Path) -> bool {
    path.exists()
}

/// Reads the holder; none before the owner has written the file.
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
                "`{}` is in use by {holder}\nhint: wait for it or stop it, or let `--out` name \
                 another folder",
                inner.display()
            )
        );
        // Another folder is free, and this folder is free once its owner is gone.
        OutputLock::acquire(folder.path()).unwrap();
        drop(held);
        OutputLock::acquire(&inner).unwrap();
    }

    #[test]
    fn what_was_made_for_a_lock_can_be_removed() {
        let folder = tempfile::tempdir().unwrap();
        let names = || -> Vec<_> {
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        let inner = folder.path().join("runs/a");
        let lock = OutputLock::acquire(&inner).unwrap();
        // A file without a name can still be locked, but does not lock the folder.
        let waiting = File::open(inner.join(LOCK_FILE)).unwrap();
        lock.remove_made();
        assert!(names().is_empty(), "{:?}", names());
        drop(lock);
        waiting.try_lock().unwrap();
        let again = OutputLock::acquire(&inner).unwrap();
        assert!(matches!(OutputLock::acquire(&inner), Err(TrainError::Locked { .. })));
        drop(again);
        // Files that existed before stay.
        OutputLock::acquire(&inner).unwrap().remove_made();
        assert!(inner.join(LOCK_FILE).exists());
        fs::remove_file(inner.join(LOCK_FILE)).unwrap();
        OutputLock::acquire(&inner).unwrap().remove_made();
        assert!(inner.exists() && !inner.join(LOCK_FILE).exists());
    }

    #[test]
    fn an_output_folder_that_cannot_be_made_has_a_hint() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("file"), "x").unwrap();
        let error = OutputLock::acquire(&folder.path().join("file/run")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write to the output folder `"), "{error}");
        assert!(error.contains("\nhint: `--out` names a folder that you can write to"), "{error}");
    }
}
