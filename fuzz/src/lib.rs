//! What the fuzz targets share: a limit on memory, a scratch folder, and edits of JSON.
//!
//! Every target calls a parser of untrusted input inside of [`within_memory`]. What it finds is a
//! panic, or an allocation out of proportion.

pub mod json;

use std::alloc::System;
use std::path::PathBuf;

use cap::Cap;
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);

/// Bytes that a parser may hold for each byte of its input. JSON needs the most: a node of a map
/// takes 632 bytes in memory for one entry of 7 (`{"":0},`).
const PER_BYTE: usize = 256;
/// Bytes that a parser may hold whatever its input: buffers of files are 1 MiB.
pub const BASE_BYTES: usize = 8 << 20;

/// Runs a parser over `input_bytes` bytes. An allocation over `base_bytes` and 256 bytes for each
/// byte of input fails, which ends the process.
pub fn within_memory<T>(base_bytes: usize, input_bytes: usize, parse: impl FnOnce() -> T) -> T {
    let limit = ALLOCATOR.allocated() + base_bytes + PER_BYTE * input_bytes;
    ALLOCATOR.set_limit(limit).expect("the limit is above what is allocated");
    let result = parse();
    ALLOCATOR.set_limit(usize::MAX).expect("there is no limit between two inputs");
    result
}

/// A folder for files that a parser opens by name: in memory where the system has such a place.
pub struct Scratch(TempDir);

impl Scratch {
    /// An empty folder.
    pub fn new() -> Scratch {
        let memory = PathBuf::from("/dev/shm");
        let parent = if memory.is_dir() { memory } else { std::env::temp_dir() };
        Scratch(tempfile::tempdir_in(parent).expect("a folder can be made"))
    }

    /// The path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file and gives its path.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("a file can be written");
        path
    }
}

impl Default for Scratch {
    fn default() -> Scratch {
        Scratch::new()
    }
}
