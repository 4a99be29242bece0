//! Sizes of the files of a bundle, as a table and as JSON.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::kernels::manifest::{aligned, grouped};
use crate::source::files;

/// Largest total size of a bundle.
pub(super) const BYTES_MAX: u64 = 64_000_000;

/// A file of the bundle.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Path relative to the bundle's folder, with forward slashes.
    pub(super) path: String,
    pub(super) bytes: u64,
    /// BLAKE3 in hexadecimal.
    pub(super) hash: String,
}

/// Returns the files of the bundle at `folder`, sorted by name.
pub(super) fn parts(folder: &Path) -> Result<Vec<Part>> {
    files(folder)?
        .into_iter()
        .map(|path| {
            let content = fs::read(&path)?;
            Ok(Part {
                path: path.strip_prefix(folder)?.to_string_lossy().replace('\\', "/"),
                bytes: content.len() as u64,
                hash: blake3::hash(&content).to_hex().to_string(),
            })
        })
        .collect()
}

/// Formats a line for each file, and the sum.
pub(super) fn table(parts: &[Part]) -> String {
    let lines = parts.iter().map(|part| (part.path.as_str(), part.bytes));
    let lines = lines.chain([("in all", total_bytes(parts))]);
    let mut rows = vec![vec!["file".to_string(), "bytes".to_string()]];
    rows.extend(lines.map(|(name, bytes)| vec![name.to_string(), grouped(bytes)]));
    aligned(&rows, &[false, true])
}

pub(super) fn total_bytes(parts: &[Part]) -> u64 {
    parts.iter().map(|part| part.bytes).sum()
}

/// Returns an error if the bundle exceeds [`BYTES_MAX`].
pub(super) fn check_size(parts: &[Part]) -> Result<()> {
    let bytes = total_bytes(parts);
    if bytes > BYTES_MAX {
        bail!(
            "the bundle has {} bytes, {} are allowed; the table above says where they are",
            grouped(bytes),
            grouped(BYTES_MAX)
        );
    }
    Ok(())
}

pub(super) fn to_json(parts: &[Part]) -> Value {
    let files: Vec<_> = parts
        .iter()
        .map(|part| json!({"path": part.path, "bytes": part.bytes, "blake3": part.hash}))
        .collect();
    json!(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(path: &str, bytes: u64) -> Part {
        Part { path: path.to_string(), bytes, hash: "00".to_string() }
    }

    #[test]
    fn the_table_of_a_bundle() {
        let parts = [
            part("corpus.tar.gz", 5_012_345),
            part("deepwell", 11_644_200),
            part("kernels.tar.gz", 39_008),
            part("run.sh", 900),
            part("tests.tar.gz", 6_000_000),
        ];
        insta::assert_snapshot!(table(&parts));
    }

    #[test]
    fn sizes_that_are_allowed() {
        let check = |bytes: &[u64], expected: bool| {
            let parts: Vec<_> = bytes.iter().map(|&bytes| part("x", bytes)).collect();
            assert_eq!(check_size(&parts).is_ok(), expected, "{bytes:?}");
        };
        check(&[], true);
        check(&[BYTES_MAX], true);
        check(&[BYTES_MAX, 1], false);
        check(&[BYTES_MAX / 2, BYTES_MAX / 2 + 1], false);
    }

    #[test]
    fn parts_of_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tests")).unwrap();
        fs::write(folder.path().join("tests/a"), "xyz").unwrap();
        fs::write(folder.path().join("run.sh"), "").unwrap();
        let found = parts(folder.path()).unwrap();
        let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
        let expected = [
            Part { path: "run.sh".to_string(), bytes: 0, hash: hash("") },
            Part { path: "tests/a".to_string(), bytes: 3, hash: hash("xyz") },
        ];
        assert_eq!(found, expected);
    }
}
