//! Compiled kernels within the library: a pack for each architecture, embedded by the build script.
//!
//! A pack is compressed as a whole (LZMA), since kernels resemble each other: each cubin by itself
//! takes twice as much. Within is a list of files: length of the name and of the cubin, u32
//! little-endian, then both. `cargo xtask package` writes packs.

use std::collections::HashMap;
use std::io::Read;
use std::sync::{Mutex, PoisonError};

use lzma_rust2::LzmaReader;

/// Names of architectures, `sm_90a` for example, with their packs.
static PACKS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/packs.rs"));

/// Packs that a device has asked for, decompressed. A pack that cannot be read is empty.
static OPEN: Mutex<Vec<(&str, Files)>> = Mutex::new(Vec::new());

/// Cubins by the name of their `.cu` file.
type Files = HashMap<String, Vec<u8>>;

/// The cubin of `<file>.cu` for an architecture; `None` if the library has none.
pub(super) fn cubin(architecture: &str, file: &str) -> Option<Vec<u8>> {
    let &(name, pack) = PACKS.iter().find(|(name, _)| *name == architecture)?;
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if !open.iter().any(|(known, _)| *known == name) {
        open.push((name, unpack(pack).unwrap_or_default()));
    }
    let (_, files) = open.iter().find(|(known, _)| *known == name)?;
    files.get(file).cloned()
}

fn unpack(pack: &[u8]) -> Option<Files> {
    let mut bytes = Vec::new();
    LzmaReader::new_mem_limit(pack, u32::MAX, None).ok()?.read_to_end(&mut bytes).ok()?;
    let mut files = Files::new();
    let mut rest = bytes.as_slice();
    while let Some((lengths, after)) = rest.split_at_checked(8) {
        let length = |at: usize| {
            let bytes = lengths[at..].first_chunk::<4>();
            bytes.map(|&bytes| u32::from_le_bytes(bytes) as usize)
        };
        let (name, after) = after.split_at_checked(length(0)?)?;
        let (cubin, after) = after.split_at_checked(length(4)?)?;
        files.insert(String::from_utf8(name.to_vec()).ok()?, cubin.to_vec());
        rest = after;
    }
    Some(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files `a`, empty, and `b`, `two`, compressed by Python's `lzma`.
    const PACK: &[u8] = include_bytes!("packs_test.pack");

    #[test]
    fn cubins_come_out_as_they_went_in() {
        let files = unpack(PACK).unwrap();
        let expected = [("a", &b""[..]), ("b", b"two")];
        let expected = expected.map(|(name, cubin)| (name.to_string(), cubin.to_vec()));
        assert_eq!(files, Files::from(expected));
        assert!(unpack(&PACK[..PACK.len() / 2]).is_none(), "a pack that was cut off");
        assert_eq!(cubin("sm_10", "b"), None, "an architecture without a pack");
    }
}
