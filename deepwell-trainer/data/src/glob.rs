//! Patterns such as `texts/**/*.txt`, for run files and for shells that do not expand them.

use std::path::{Component, Path, PathBuf};

use globset::GlobBuilder;
use walkdir::{DirEntry, WalkDir};

use super::DataError;

const WILDCARDS: [char; 3] = ['*', '?', '['];

/// Returns the files and folders that match a pattern, sorted; `None` for a path without wildcards.
///
/// `*`, `?` and `[…]` match within one component of a path, `**` matches any number of components.
/// A matching folder includes everything below it. Hidden entries are skipped unless a component of
/// the pattern starts with a dot.
pub(crate) fn expand(input: &Path) -> Result<Option<Vec<PathBuf>>, DataError> {
    let is_pattern =
        |part: &Component<'_>| part.as_os_str().to_string_lossy().contains(WILDCARDS.as_slice());
    let parts: Vec<Component<'_>> = input.components().collect();
    let Some(first) = parts.iter().position(is_pattern) else { return Ok(None) };
    let base: PathBuf = parts[..first].iter().collect();
    let rest: Vec<_> =
        parts[first..].iter().map(|part| part.as_os_str().to_string_lossy()).collect();
    let glob = GlobBuilder::new(&rest.join("/")).literal_separator(true).build();
    let glob = glob.map_err(|error| DataError::Pattern {
        pattern: input.to_owned(),
        message: error.kind().to_string(),
    })?;
    let matcher = glob.compile_matcher();
    let depth_max = if rest.iter().any(|part| part == "**") { usize::MAX } else { rest.len() };
    let takes_hidden = rest.iter().any(|part| part.starts_with('.'));
    let is_hidden = |entry: &DirEntry| entry.file_name().to_string_lossy().starts_with('.');
    let mut matches = Vec::new();
    let folder = if base.as_os_str().is_empty() { Path::new(".") } else { base.as_path() };
    if folder.is_dir() {
        let walk = WalkDir::new(folder).min_depth(1).max_depth(depth_max).into_iter();
        let mut walk =
            walk.filter_entry(|entry| entry.depth() == 0 || takes_hidden || !is_hidden(entry));
        while let Some(entry) = walk.next() {
            let entry = entry.map_err(|error| DataError::Read {
                path: error.path().unwrap_or(folder).to_owned(),
                source: error.into(),
            })?;
            let below = entry.path().strip_prefix(folder).unwrap_or(entry.path());
            if matcher.is_match(below) {
                matches.push(base.join(below));
                if entry.file_type().is_dir() {
                    walk.skip_current_dir();
                }
            }
        }
    }
    if matches.is_empty() {
        return Err(DataError::Missing { path: input.to_owned() });
    }
    matches.sort();
    Ok(Some(matches))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_they_mean_in_a_shell() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for name in
            ["a.txt", "b.txt", "c.md", ".h.txt", "sub/d.txt", "sub/deep/e.txt", "sub/.git/f"]
        {
            let path = root.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }
        let check = |pattern: &str, expected: Option<&[&str]>| {
            let matches = expand(&root.join(pattern)).unwrap();
            let names = matches.as_ref().map(|matches| {
                matches.iter().map(|path| path.strip_prefix(root).unwrap().to_str().unwrap())
            });
            assert_eq!(names.map(Iterator::collect::<Vec<_>>).as_deref(), expected, "{pattern}");
        };
        check("a.txt", None);
        check("none", None);
        check("*.txt", Some(&["a.txt", "b.txt"]));
        check(".*.txt", Some(&[".h.txt"]));
        check("[ac].*", Some(&["a.txt", "c.md"]));
        check("?.md", Some(&["c.md"]));
        check("*/*.txt", Some(&["sub/d.txt"]));
        check("s*", Some(&["sub"]));
        check("**/*.txt", Some(&["a.txt", "b.txt", "sub/d.txt", "sub/deep/e.txt"]));
        check("sub/**/e.txt", Some(&["sub/deep/e.txt"]));

        let check_error = |pattern: &str, expected: &str| {
            let message = expand(&root.join(pattern)).unwrap_err().to_string();
            let message = message.replace(&format!("{}/", root.display()), "");
            assert!(message.starts_with(expected), "{message}");
        };
        check_error("*.html", "no file or folder `*.html`");
        check_error("none/*.txt", "no file or folder `none/*.txt`");
        check_error("[a", "`[a`: expected a pattern, got one with an unclosed");
    }
}
