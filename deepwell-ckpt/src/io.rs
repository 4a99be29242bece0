//! The disk operations of a checkpoint.
//!
//! They are a trait so that a test can fail, or kill the process, at the n-th operation for every
//! n.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;

/// The largest piece passed to the operating system, and the size of every buffer for saving,
/// loading and verifying: memory use does not grow with the model.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Operations that change the disk.
pub(crate) trait Io {
    /// An open file.
    type File;
    /// Creates a folder, which must not exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file, which must not exist.
    fn create_file(&self, path: &Path) -> io::Result<Self::File>;
    /// Appends all the bytes.
    fn write(&self, file: &mut Self::File, bytes: &[u8]) -> io::Result<()>;
    /// Returns once the file's bytes are on disk.
    fn sync_file(&self, file: &Self::File) -> io::Result<()>;
    /// Returns once the folder's entries are on disk.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or folder within one folder, atomically.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder and its contents; not atomic.
    fn remove_dir_all(&self, path: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
}

/// The operating system's file system.
pub(crate) struct DiskIo;

impl Io for DiskIo {
    type File = File;

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        File::create_new(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn sync_file(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    #[cfg(unix)]
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    // On other systems a folder cannot be opened as a file, and a rename is durable without a sync.
    #[cfg(not(unix))]
    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_dir_all(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// A file being written, with a running checksum.
pub(crate) struct HashingFile<'a, I: Io> {
    io: &'a I,
    file: I::File,
    path: PathBuf,
    hasher: blake3::Hasher,
    bytes: u64,
}

/// Checksum and length of a finished file.
pub(crate) struct FileDigest {
    /// Checksum of all bytes, in hexadecimal.
    pub(crate) blake3: String,
    /// Length in bytes.
    pub(crate) bytes: u64,
}

impl<'a, I: Io> HashingFile<'a, I> {
    pub(crate) fn create(io: &'a I, path: PathBuf) -> Result<Self, CheckpointError> {
        let file = io.create_file(&path).map_err(CheckpointError::io("create", &path))?;
        Ok(HashingFile { io, file, path, hasher: blake3::Hasher::new(), bytes: 0 })
    }

    /// Appends bytes in pieces; `on_piece` receives each piece while it is still in the cache.
    pub(crate) fn append(
        &mut self,
        bytes: &[u8],
        mut on_piece: impl FnMut(&[u8]),
    ) -> Result<(), CheckpointError> {
        for piece in bytes.chunks(PIECE_BYTES) {
            self.io
                .write(&mut self.file, piece)
                .map_err(CheckpointError::io("write", &self.path))?;
            self.hasher.update(piece);
            self.bytes += piece.len() as u64;
            on_piece(piece);
        }
        Ok(())
    }

    /// Syncs the file to disk.
    pub(crate) fn finish(self) -> Result<FileDigest, CheckpointError> {
        self.io.sync_file(&self.file).map_err(CheckpointError::io("sync", &self.path))?;
        Ok(FileDigest { blake3: self.hasher.finalize().to_hex().to_string(), bytes: self.bytes })
    }
}
