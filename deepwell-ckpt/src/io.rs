//! The few operations through which a checkpoint reaches the disk.
//!
//! They are a trait so that a test can fail, or stop the world, at the n-th of them for every n.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::CheckpointError;

/// The largest piece handed to the operating system, and the size of every buffer that saving,
/// loading and verifying use: none of them needs memory in proportion to the model.
pub(crate) const PIECE_BYTES: usize = 1 << 20;

/// Operations that change the disk.
pub(crate) trait Io {
    /// An open file.
    type File;
    /// Creates one folder, which must not exist.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Creates a file, which must not exist.
    fn create_file(&self, path: &Path) -> io::Result<Self::File>;
    /// Appends all the bytes.
    fn write(&self, file: &mut Self::File, bytes: &[u8]) -> io::Result<()>;
    /// Returns when the file's bytes are on the disk.
    fn sync_file(&self, file: &Self::File) -> io::Result<()>;
    /// Returns when the folder's entries are on the disk.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file or folder within one folder, in one step.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder and what is in it; not in one step.
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

    // Elsewhere a folder cannot be opened as a file, and a rename is durable without it.
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

/// A file being written, whose checksum is taken on the way.
pub(crate) struct HashingFile<'a, I: Io> {
    io: &'a I,
    file: I::File,
    path: PathBuf,
    hasher: blake3::Hasher,
    bytes: u64,
}

/// What a finished file is known by.
pub(crate) struct FileDigest {
    /// Checksum of all its bytes, in hexadecimal.
    pub(crate) blake3: String,
    /// Its length.
    pub(crate) bytes: u64,
}

impl<'a, I: Io> HashingFile<'a, I> {
    pub(crate) fn create(io: &'a I, path: PathBuf) -> Result<Self, CheckpointError> {
        let file = io.create_file(&path).map_err(CheckpointError::io("create", &path))?;
        Ok(HashingFile { io, file, path, hasher: blake3::Hasher::new(), bytes: 0 })
    }

    /// Appends bytes, piece by piece; `on_piece` sees each piece while it is still in the cache.
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

    /// Waits until the file is on the disk.
    pub(crate) fn finish(self) -> Result<FileDigest, CheckpointError> {
        self.io.sync_file(&self.file).map_err(CheckpointError::io("sync", &self.path))?;
        Ok(FileDigest { blake3: self.hasher.finalize().to_hex().to_string(), bytes: self.bytes })
    }
}

/// Reads up to the buffer's length; less only at the end of the file.
pub(crate) fn read_full(mut source: impl io::Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match source.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
