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
pub(super) struct BundleFile {
    /// Path relative to the bundle's folder, with forward slashes.
    pub(super) path: String,
    pub(super) bytes: u64,
    /// BLAKE3 in hexadecimal.
    pub(super) hash: String,
}

/// Returns the files of the bundle at `folder`, sorted by name.
pub(super) fn list(folder: &Path) -> Result<Vec<BundleFile>> {
    files(folder)?
        .into_iter()
        .map(|path| {
            let content = fs::read(&path)?;
            Ok(BundleFile {
                path: path.strip_prefix(folder)?.to_string_lossy().replace('\\', "/"),
                bytes: content.len() as u64,
                hash: blake3::hash(&content).to_hex().to_string(),
            })
        })
        .collect()
}

/// Formats a line for each file, and the sum.
pub(super) fn table(files: &[BundleFile]) -> String {
    let lines = files.iter().map(|file| (file.path.as_str(), file.bytes));
    let lines = lines.chain([("in all", total_bytes(files))]);
    let mut rows = vec![vec!["file".to_string(), "bytes".to_string()]];
    rows.extend(lines.map(|(name, bytes)| vec![name.to_string(), grouped(bytes)]));
    aligned(&rows, &[false, true])
}

pub(super) fn total_bytes(files: &[BundleFile]) -> u64 {
    files.iter().map(|file| file.bytes).sum()
}

/// Returns an error if the bundle exceeds [`BYTES_MAX`].
pub(super) fn check_size(files: &[BundleFile]) -> Result<()> {
    let bytes = total_bytes(files);
    if bytes > BYTES_MAX {
        bail!(
            "the bundle has {} bytes, {} are allowed; the table above says where they are",
            grouped(bytes),
            grouped(BYTES_MAX)
        );
    }
    Ok(())
}

pub(super) fn to_json(files: &[BundleFile]) -> Value {
    let files: Vec<_> = files
        .iter()
        .map(|file| json!({"path": file.path, "bytes": file.bytes, "blake3": file.hash}))
        .collect();
    json!(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, bytes: u64) -> BundleFile {
        BundleFile { path: path.to_string(), bytes, hash: "00".to_string() }
    }

    #[test]
    fn the_table_of_a_bundle() {
        let files = [
            file("command.tar.gz", 11_644_200),
            file("corpus.tar.gz", 5_012_345),
            file("kernels.tar.gz", 39_008),
            file("run.sh", 900),
            file("tests.tar.gz", 6_000_000),
        ];
        insta::assert_snapshot!(table(&files));
    }

    #[test]
    fn sizes_that_are_allowed() {
        let check = |bytes: &[u64], expected: bool| {
            let files: Vec<_> = bytes.iter().map(|&bytes| file("x", bytes)).collect();
            assert_eq!(check_size(&files).is_ok(), expected, "{bytes:?}");
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
        let found = list(folder.path()).unwrap();
        let hash = |text: &str| blake3::hash(text.as_bytes()).to_hex().to_string();
        let expected = [
            BundleFile { path: "run.sh".to_string(), bytes: 0, hash: hash("") },
            BundleFile { path: "tests/a".to_string(), bytes: 3, hash: hash("xyz") },
        ];
        assert_eq!(found, expected);
    }
}
