//! Rule: a function has at most 70 lines, from `fn` to the closing brace. Tests are left out.
//!
//! `long_functions.toml` lists the known longer ones with their lines. Its numbers only fall:
//! `cargo xtask tidy --lower` writes lower ones and drops those that are gone.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use toml::{Table, Value};

use super::Violation;

use crate::source::{RustLines, is_word, read, split_rust};

/// The list, from the root.
const LIST: &str = "xtask/src/tidy/long_functions.toml";

/// First lines of the list.
const HEAD: &str = "\
# Lines of functions longer than the limit of `cargo xtask tidy`, by file and name. Numbers only
# fall: `cargo xtask tidy --lower` writes lower ones.

";

const LINES_MAX: usize = 70;

/// A function longer than [`LINES_MAX`].
#[derive(Debug, PartialEq, Eq)]
struct LongFunction {
    name: String,
    /// Line of `fn`, counted from 1.
    line: usize,
    lines: usize,
}

/// The long functions of the repository.
#[derive(Debug, Default)]
pub(super) struct LongFunctions {
    /// Lines, and the place, by file and name.
    functions: BTreeMap<String, (usize, Violation)>,
}

impl LongFunctions {
    /// Measures the functions in texts, each with its path.
    pub(super) fn measure(texts: &[(String, String)]) -> LongFunctions {
        let is_test = |path: &str| path.contains("/tests/") || path.ends_with("tests.rs");
        let sources = texts.iter().filter(|(path, _)| path.ends_with(".rs") && !is_test(path));
        let mut functions = BTreeMap::new();
        for (path, text) in sources {
            for long in long_functions(&split_rust(text)) {
                let (name, lines) = (&long.name, long.lines);
                let message =
                    format!("`{name}` has {lines} lines, {LINES_MAX} is the limit; split it");
                let violation = Violation::new(path, long.line, message);
                functions.insert(format!("{path} {name}"), (lines, violation));
            }
        }
        LongFunctions { functions }
    }

    /// Functions longer than listed, and entries of the list that can be lower.
    pub(super) fn check(&self, root: &Path) -> Result<Vec<Violation>> {
        Ok(self.compare(&read_list(root)?))
    }

    /// Writes the list with the entries that have become lower.
    pub(super) fn lower(&self, root: &Path) -> Result<()> {
        let text = format!("{HEAD}{}", toml::to_string(&self.lowered(&read_list(root)?))?);
        std::fs::write(root.join(LIST), text).with_context(|| format!("cannot write {LIST}"))
    }

    fn compare(&self, list: &Table) -> Vec<Violation> {
        let too_long = self.functions.iter().filter(|(key, (lines, _))| *lines > listed(list, key));
        let mut violations: Vec<_> = too_long.map(|(_, (_, place))| place.clone()).collect();
        for key in list.keys() {
            let (before, now) = (listed(list, key), self.lines(key));
            if now < before {
                let message = format!(
                    "`{key}` is listed with {before} lines and has fewer; run `cargo xtask tidy \
                     --lower`"
                );
                violations.push(Violation::new(LIST, 0, message));
            }
        }
        violations
    }

    fn lowered(&self, list: &Table) -> Table {
        let lowered = list.keys().filter(|key| self.functions.contains_key(*key)).map(|key| {
            let lines = self.lines(key).min(listed(list, key));
            (key.clone(), Value::Integer(lines as i64))
        });
        lowered.collect()
    }

    /// Lines of a function, zero if it is not a long one.
    fn lines(&self, key: &str) -> usize {
        self.functions.get(key).map_or(0, |(lines, _)| *lines)
    }
}

fn read_list(root: &Path) -> Result<Table> {
    read(&root.join(LIST))?.parse().context(LIST)
}

/// The listed lines of a function; zero without an entry.
fn listed(list: &Table, key: &str) -> usize {
    let lines = list.get(key).and_then(Value::as_integer);
    lines.and_then(|lines| usize::try_from(lines).ok()).unwrap_or(0)
}

/// The long functions of a Rust file.
fn long_functions(lines: &RustLines) -> Vec<LongFunction> {
    let mut found = Vec::new();
    for (index, code) in lines.code.iter().enumerate() {
        let Some(name) = function_name(code) else { continue };
        if let Some(count) = lines_of_body(&lines.code[index..])
            && count > LINES_MAX
        {
            found.push(LongFunction { name: name.to_string(), line: index + 1, lines: count });
        }
    }
    found
}

/// The name in a line that begins a function.
fn function_name(code: &str) -> Option<&str> {
    let mut rest = code;
    loop {
        let (before, after) = rest.split_once("fn ")?;
        if !before.ends_with(is_word) {
            let end = after.find(|character| !is_word(character)).unwrap_or(after.len());
            return Some(&after[..end]).filter(|name| !name.is_empty());
        }
        rest = after;
    }
}

/// Lines to the brace that closes the first open one; `None` for a declaration without body.
fn lines_of_body(code: &[String]) -> Option<usize> {
    let (mut braces, mut brackets) = (0usize, 0usize);
    for (index, line) in code.iter().enumerate() {
        for character in line.chars() {
            match character {
                '{' => braces += 1,
                '}' if braces <= 1 => return (braces == 1).then_some(index + 1),
                '}' => braces -= 1,
                '(' | '[' => brackets += 1,
                ')' | ']' => brackets = brackets.saturating_sub(1),
                ';' if braces == 0 && brackets == 0 => return None,
                _ => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_over_the_limit() {
        let check = |text: &str, expected: &[(&str, usize, usize)]| {
            let found = long_functions(&split_rust(text));
            let found: Vec<_> =
                found.iter().map(|it| (it.name.as_str(), it.line, it.lines)).collect();
            assert_eq!(found, expected);
        };
        let body = |lines: usize| "    f(\"}\");\n".repeat(lines);
        check(&format!("fn a() {{\n{}}}\n", body(68)), &[]);
        check(&format!("fn a() {{\n{}}}\n", body(69)), &[("a", 1, 71)]);
        check(&format!("\npub fn a(\n    x: [u8; 2],\n) {{\n{}}}\n", body(70)), &[("a", 2, 74)]);
        check(&format!("trait T {{\n    fn a();\n{}}}\n", "    // c\n".repeat(80)), &[]);
        check(&format!("type F = fn (u8) -> u8;\n{}", "// c\n".repeat(80)), &[]);
    }

    #[test]
    fn listed_lines_only_fall() {
        let list: Table = "\"a.rs f\" = 90\n\"b.rs g\" = 80\n".parse().unwrap();
        let check = |lines: &[(&str, usize)], expected: &[&str], lowered: &str| {
            let place = |key: &str| Violation::new(key, 1, "too long");
            let functions =
                lines.iter().map(|&(key, lines)| (key.to_string(), (lines, place(key)))).collect();
            let long = LongFunctions { functions };
            let violations: Vec<_> = long.compare(&list).iter().map(ToString::to_string).collect();
            assert_eq!(violations.len(), expected.len(), "{violations:?}");
            for (message, expected) in violations.iter().zip(expected) {
                assert!(message.contains(expected), "expected `{expected}` in `{message}`");
            }
            assert_eq!(toml::to_string(&long.lowered(&list)).unwrap(), lowered);
        };
        let unchanged = "\"a.rs f\" = 90\n\"b.rs g\" = 80\n";
        check(&[("a.rs f", 90), ("b.rs g", 80)], &[], unchanged);
        check(&[("a.rs f", 91), ("b.rs g", 80)], &["a.rs f:1: too long"], unchanged);
        let lower = "\"a.rs f\" = 85\n\"b.rs g\" = 80\n";
        check(&[("a.rs f", 85), ("b.rs g", 80)], &["`a.rs f` is listed with 90 lines"], lower);
        check(&[("a.rs f", 90)], &["`b.rs g` is listed"], "\"a.rs f\" = 90\n");
        check(&[("a.rs f", 90), ("b.rs g", 80), ("c.rs h", 71)], &["c.rs h:1"], unchanged);
    }
}
