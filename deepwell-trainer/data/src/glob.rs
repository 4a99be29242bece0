//! Patterns such as `texts/**/*.txt`, for run files and for shells that do not expand them.

use std::io;
use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher};

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
    let walk = Walk {
        matcher: glob.compile_matcher(),
        depth_max: if rest.iter().any(|part| part == "**") { usize::MAX } else { rest.len() },
        takes_hidden: rest.iter().any(|part| part.starts_with('.')),
    };
    let mut matches = Vec::new();
    let folder = if base.as_os_str().is_empty() { Path::new(".") } else { base.as_path() };
    if folder.is_dir() {
        walk.folder(folder, &base, "", 1, &mut matches)?;
    }
    if matches.is_empty() {
        return Err(DataError::Missing { path: input.to_owned() });
    }
    matches.sort();
    Ok(Some(matches))
}

struct Walk {
    matcher: GlobMatcher,
    depth_max: usize,
    takes_hidden: bool,
}

impl Walk {
    /// Walks a folder; `shown` is the folder's prefix in the found paths, `below` its path below
    /// the base.
    fn folder(
        &self,
        folder: &Path,
        shown: &Path,
        below: &str,
        depth: usize,
        matches: &mut Vec<PathBuf>,
    ) -> Result<(), DataError> {
        let fail = |source: io::Error| DataError::Read { path: folder.to_owned(), source };
        for entry in std::fs::read_dir(folder).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name();
            let text = name.to_string_lossy();
            if text.starts_with('.') && !self.takes_hidden {
                continue;
            }
            let below = format!("{below}{text}");
            if self.matcher.is_match(&below) {
                matches.push(shown.join(&name));
            } else if depth < self.depth_max && entry.file_type().map_err(fail)?.is_dir() {
                let below = format!("{below}/");
                self.folder(&entry.path(), &shown.join(&name), &below, depth + 1, matches)?;
            }
        }
        Ok(())
    }
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
