//! Rule: the sources and the page of environment variables list the same variables.
//!
//! Deepwell's variables are recognized by the prefix of the name. In a Rust file that reads the
//! environment, every other string in capital letters also counts as a variable; exceptions are
//! listed in [`NO_VARIABLES`].

use std::collections::BTreeMap;

use super::Violation;
use crate::source::is_word;

/// The page.
pub(super) const PAGE: &str = "docs/environment.md";
/// Prefix of Deepwell's variables. Split, because this file is checked too.
const OWN: &str = concat!("DEEP", "WELL_");
/// Expressions that read or set variables in Rust.
const READS: [&str; 2] = [concat!("env::", "var"), concat!("env_", "remove")];
/// Strings in capital letters, in files that read the environment, that are no variables.
const NO_VARIABLES: [&str; 4] = ["CARGO_PKG_VERSION", "FOLDER", "MPI", "NCCL"];

/// Compares the page with `sources`, pairs of path and text.
pub(super) fn check(sources: &[(String, String)], page: Option<&str>) -> Vec<Violation> {
    let mut found: BTreeMap<&str, (&str, usize)> = BTreeMap::new();
    for (path, text) in sources {
        for (line, name) in variables(path, text) {
            found.entry(name).or_insert((path, line));
        }
    }
    let documented = documented(page.unwrap_or_default());
    let missing = found.iter().filter(|(name, _)| !documented.contains_key(*name)).map(
        |(name, (path, line))| {
            Violation::new(path, *line, format!("`{name}` is not in {PAGE}; add a row"))
        },
    );
    let unknown =
        documented.iter().filter(|(name, _)| !found.contains_key(*name)).map(|(name, line)| {
            Violation::new(PAGE, *line, format!("`{name}` is read nowhere; remove the row"))
        });
    missing.chain(unknown).collect()
}

/// Whether a file may read the environment.
pub(super) fn is_of_interest(path: &str) -> bool {
    path.ends_with(".rs") || path.ends_with(".sh") || path == ".ci/run"
}

/// Returns the lines and names of the variables in a file.
fn variables<'a>(path: &str, text: &'a str) -> Vec<(usize, &'a str)> {
    let is_rust = path.ends_with(".rs");
    let takes_all = is_rust && READS.iter().any(|reads| text.contains(reads));
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let names: Vec<&str> = match is_rust {
            // The contents of strings.
            true => line.split('"').skip(1).step_by(2).collect(),
            false => line.split(|c: char| !is_word(c)).collect(),
        };
        let is_variable = |name: &&str| {
            let is_own = name.strip_prefix(OWN).is_some_and(|rest| !rest.is_empty());
            is_own && is_capital(name)
                || takes_all && is_capital(name) && !NO_VARIABLES.contains(name)
        };
        found.extend(names.into_iter().filter(is_variable).map(|name| (index + 1, name)));
    }
    found
}

/// Whether a name is like `RANK` or `CUDA_HOME`, and not like `A` or `F32`.
fn is_capital(name: &str) -> bool {
    let is_in_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    name.len() > 2
        && name.starts_with(|c: char| c.is_ascii_uppercase())
        && name.chars().all(is_in_name)
        && name.chars().filter(|c| c.is_ascii_digit()).count() < 2
        && !name.ends_with('_')
}

/// Returns the names in backticks in the page's table rows, with their lines; the backticks must
/// contain only the name.
fn documented(page: &str) -> BTreeMap<&str, usize> {
    let mut found = BTreeMap::new();
    for (index, line) in page.lines().enumerate().filter(|(_, line)| line.starts_with('|')) {
        for name in line.split('`').skip(1).step_by(2).filter(|name| is_capital(name)) {
            found.entry(name).or_insert(index + 1);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Variables of a Rust file or a script that the page does not have, and rows of the page
    /// without a variable.
    #[test]
    fn variables_and_rows_that_have_no_other_side() {
        let own = concat!("DEEP", "WELL_X");
        let read = concat!("let home = std::env::", "var_os(\"MY_HOME\");");
        let row = |name: &str| format!("| `{name}` | a folder | what |\n");
        let check_one = |path: &str, text: &str, page: &str, expected: &[&str]| {
            let sources = [(path.to_string(), text.to_string())];
            let found: Vec<String> =
                check(&sources, Some(page)).iter().map(ToString::to_string).collect();
            assert_eq!(found.len(), expected.len(), "{path} {text}: {found:?}");
            for (found, expected) in found.iter().zip(expected) {
                assert!(found.contains(expected), "expected `{expected}` in `{found}`");
            }
        };
        check_one("a.rs", read, &row("MY_HOME"), &[]);
        check_one("a.rs", read, "", &["a.rs:1: `MY_HOME` is not in docs/environment.md"]);
        check_one("a.rs", "let home = \"MY_HOME\";", "", &[]);
        check_one("a.rs", "", &row("MY_HOME"), &["environment.md:1: `MY_HOME` is read nowhere"]);
        // Deepwell's own, wherever they are named; prose is no row.
        check_one("a.rs", &format!("const A: &str = \"{own}\";"), "", &["is not in"]);
        check_one("run.sh", &format!("export {own}=${{{own}:-1}}"), &row(own), &[]);
        check_one("run.sh", &format!("unset {own}"), &format!("`{own}`"), &["run.sh:1: "]);
        check_one("a.rs", "// of all DEEP", "", &[]);
    }
}
