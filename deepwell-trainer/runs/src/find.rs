//! Search for folders of runs, and their names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use crate::RunsError;

/// Depth of the search below a given folder.
const DEPTH_MAX: usize = 4;
/// Folders within a run's folder, which have no runs of their own.
const PARTS: [&str; 3] = ["checkpoints", "events", "model"];

/// Returns the folders of all runs at and below `paths`, without duplicates, each with a
/// unique name: the shortest end of its path that is no end of another path.
///
/// # Errors
/// [`RunsError::Missing`], [`RunsError::NoRun`], and folders that cannot be read.
pub fn find_runs(paths: &[PathBuf]) -> Result<Vec<(String, PathBuf)>, RunsError> {
    let mut seen = BTreeSet::new();
    let mut folders = Vec::new();
    for path in paths {
        if !path.exists() {
            return Err(RunsError::Missing { path: path.clone() });
        }
        let mut found = Vec::new();
        search(path, DEPTH_MAX, &mut found)?;
        if found.is_empty() {
            return Err(RunsError::NoRun { path: path.clone(), depth: DEPTH_MAX });
        }
        for folder in found {
            let whole = fs::canonicalize(&folder).map_err(RunsError::read(&folder))?;
            if seen.insert(whole.clone()) {
                folders.push((whole, folder));
            }
        }
    }
    let wholes: Vec<&Path> = folders.iter().map(|(whole, _)| whole.as_path()).collect();
    let names: Vec<String> = (0..wholes.len()).map(|index| name_of(&wholes, index)).collect();
    Ok(names.into_iter().zip(folders).map(|(name, (_, folder))| (name, folder)).collect())
}

/// Whether a folder holds a run. The `metrics.jsonl` of a comparison has the lines of other runs.
fn is_run(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).is_file();
    has("run.json") || has("metrics.jsonl") && !has("report.json") && !has("ablation.json")
}

fn search(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) -> Result<(), RunsError> {
    if is_run(folder) {
        found.push(folder.to_path_buf());
        return Ok(());
    }
    if depth == 0 || !folder.is_dir() {
        return Ok(());
    }
    let entries = fs::read_dir(folder).map_err(RunsError::read(folder))?;
    let mut below = Vec::new();
    for entry in entries {
        let entry = entry.map_err(RunsError::read(folder))?;
        let is_part = entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with('.') || PARTS.contains(&name));
        // A link to a folder above would never end.
        if !is_part && entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            below.push(entry.path());
        }
    }
    below.sort();
    below.iter().try_for_each(|path| search(path, depth - 1, found))
}

/// The last parts of a path, as many as no other path ends with.
fn name_of(paths: &[&Path], index: usize) -> String {
    let parts = |path: &Path| -> Vec<String> {
        let normal = path.components().filter_map(|part| match part {
            Component::Normal(name) => Some(name.to_string_lossy().into_owned()),
            _ => None,
        });
        normal.collect()
    };
    let own = parts(paths[index]);
    let others: Vec<Vec<String>> = paths
        .iter()
        .enumerate()
        .filter(|(other, _)| *other != index)
        .map(|(_, path)| parts(path))
        .collect();
    let end = |count: usize| &own[own.len() - count..];
    let is_unique = |count: &usize| !others.iter().any(|other| other.ends_with(end(*count)));
    let count = (1..=own.len()).find(is_unique).unwrap_or(own.len());
    if own.is_empty() { "run".to_owned() } else { end(count).join("/") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "").unwrap();
    }

    #[test]
    fn runs_are_found_below_folders_and_named_by_what_differs() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for file in [
            "a/seed-0/bf16/run.json",
            "a/seed-0/bf16/checkpoints/step-1/run.json",
            "a/seed-1/bf16/run.json",
            "a/metrics.jsonl",
            "a/report.json",
            "b/metrics.jsonl",
            "c/notes.txt",
        ] {
            touch(&at(file));
        }
        let check = |paths: &[&str], expected: &[&str]| {
            let paths: Vec<PathBuf> = paths.iter().map(|path| at(path)).collect();
            let found = find_runs(&paths).unwrap();
            let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
            assert_eq!(names, expected, "{paths:?}");
        };
        check(&["a"], &["seed-0/bf16", "seed-1/bf16"]);
        check(&["b", "a/seed-1"], &["b", "bf16"]);
        check(&["."], &["seed-0/bf16", "seed-1/bf16", "b"]);
        // The same run by two paths is one run.
        check(&["b", "b/.", "c/../b"], &["b"]);
        for (path, expected) in [("c", "got neither"), ("d", "no run at `")] {
            let error = find_runs(&[at(path)]).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("hint: "), "{error}");
        }
    }
}
