//! The table of rows that passed, `deepwell-kernels/tests/cuda/proofs/rows.json`.
//!
//! Each passed row leaves its entry in a file. The table joins all entries and adds a digest, which
//! tells the tests of edits by hand.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value, json};

use super::record::{FOLDER, PASSED, PROVEN, entries, folders};

/// Tables of proofs, of rows and of kernels.
pub(super) const ROWS: &str = "deepwell-kernels/tests/cuda/proofs/rows.json";
pub(super) const KERNELS: &str = "deepwell-kernels/tests/cuda/proofs/kernels.json";

/// Writes the table of all rows that passed. Rows with a valid proof keep their entries.
pub(super) fn write(root: &Path) -> Result<()> {
    let former = fs::read_to_string(root.join(ROWS)).unwrap_or_default();
    let former = serde_json::from_str(&former).unwrap_or_default();
    let rows = passed(&root.join(FOLDER), &former)?;
    if rows.is_empty() {
        bail!("no row has passed in {FOLDER}");
    }
    let path = root.join(ROWS);
    fs::write(&path, table(rows)).with_context(|| format!("cannot write {}", path.display()))
}

fn table(rows: Map<String, Value>) -> String {
    let rows = Value::Object(rows);
    let digest = blake3::hash(rows.to_string().as_bytes()).to_hex();
    format!("{:#}\n", json!({ "digest": digest[..16], "rows": rows }))
}

/// Entries of rows, by architecture and name; of proven rows from the `former` table.
fn passed(folder: &Path, former: &Value) -> Result<Map<String, Value>> {
    let mut rows = Map::new();
    for architecture in folders(folder)? {
        for mark in entries(&architecture)? {
            let (Some(row), Some(name)) = (mark.file_stem(), architecture.file_name()) else {
                continue;
            };
            let name = format!("{} {}", name.display(), row.display());
            let has_extension = |wanted| mark.extension().is_some_and(|kind| kind == wanted);
            if has_extension(PROVEN)
                && let Some(entry) = former["rows"].get(&name)
            {
                rows.insert(name, entry.clone());
            } else if has_extension(PASSED) {
                let text = fs::read_to_string(&mark)
                    .with_context(|| format!("cannot read {}", mark.display()))?;
                let entry = serde_json::from_str(&text)
                    .with_context(|| format!("{} has no entry of a row", mark.display()))?;
                rows.insert(name, entry);
            }
        }
    }
    rows.sort_keys();
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_row_that_passed() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sm_90a/gelu.passed", r#"{"files":["gelu"],"digest":"12"}"#);
        write("sm_100a/add.passed", r#"{"files":["add"],"digest":"34"}"#);
        write("sm_100a/cast.proven", "");
        write("sm_100a/rope.proven", "");
        write("sm_100a/add/add-1.toml", "");
        let entry = json!({ "files": ["cast"], "digest": "56" });
        let former = json!({ "rows": { "sm_100a cast": entry, "sm_100a relu": entry } });
        let rows = passed(folder.path(), &former).unwrap();
        let names: Vec<&String> = rows.keys().collect();
        assert_eq!(names, ["sm_100a add", "sm_100a cast", "sm_90a gelu"]);
        insta::assert_snapshot!(table(rows));
        write("sm_90a/rope.passed", "");
        let error = format!("{:#}", passed(folder.path(), &former).unwrap_err());
        assert!(error.contains("rope.passed has no entry of a row"), "{error}");
    }
}
