//! The only memory map of the crate: a read-only view of a file of the token cache.
//!
//! Protocol. Files of the cache are written under a temporary name, flushed to the disk and then
//! renamed, and never written again. A rebuilt file replaces the name, not the bytes, so an open
//! view keeps the old bytes until it is dropped.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

/// A whole file, mapped for reading.
#[derive(Debug)]
pub(crate) struct ReadMap {
    map: memmap2::Mmap,
}

impl ReadMap {
    /// Maps the whole of `path`. An empty file gives an empty view.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the view is read-only and private to this process. Its bytes change only if a
        // file of the cache is written or truncated. This crate never does so after renaming the
        // file (see the module docs), and the cache's documentation forbids it for other programs.
        // Only files of the cache are mapped, never files of the user.
        let map = unsafe { memmap2::Mmap::map(&file)? };
        Ok(Self { map })
    }

    /// The bytes of the file. The first byte is at a page boundary.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_view_outlives_the_replacement_of_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, b"old").unwrap();
        let view = ReadMap::open(&path).unwrap();
        std::fs::write(folder.path().join("b"), b"newer").unwrap();
        std::fs::rename(folder.path().join("b"), &path).unwrap();
        assert_eq!(view.bytes(), b"old");
        assert_eq!(ReadMap::open(&path).unwrap().bytes(), b"newer");
    }

    #[test]
    fn an_empty_file_is_an_empty_view_and_a_missing_one_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        assert_eq!(ReadMap::open(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        std::fs::write(&path, b"").unwrap();
        assert!(ReadMap::open(&path).unwrap().bytes().is_empty());
    }
}
