//! `cargo xtask tidy`: the machine-checked rules of the repository.
//!
//! Each message says what to do instead. `cargo test -p xtask` checks the rules, too.

mod circles;
mod cuda;
mod docs;
mod environment;
mod functions;
mod manifests;
mod names;
mod prose;
mod texts;
mod trees;

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Result;

use self::functions::LongFunctions;
use crate::arguments::{Takes, flags};

/// A violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// Path relative to the workspace root, with forward slashes.
    path: String,
    /// Line, counted from 1; 0 for the file as a whole.
    line: usize,
    /// The violation, and what to do instead.
    message: String,
}

impl Violation {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Violation { path: path.to_string(), line, message: message.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(formatter, "{}: {}", self.path, self.message),
            line => write!(formatter, "{}:{line}: {}", self.path, self.message),
        }
    }
}

pub(crate) fn run(root: &Path, args: &[OsString]) -> Result<ExitCode> {
    if !flags("tidy", args, &[("--lower", Takes::Nothing)])?.is_empty() {
        LongFunctions::measure(&texts::texts(root)?).lower(root)?;
    }
    let violations = check(root)?;
    for violation in &violations {
        println!("{violation}");
    }
    match violations.len() {
        0 => {
            println!("tidy");
            Ok(ExitCode::SUCCESS)
        }
        count => {
            println!("{count} to put right");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Returns all violations in the workspace at `root`, sorted by place.
fn check(root: &Path) -> Result<Vec<Violation>> {
    let mut violations = manifests::check(root)?;
    let texts = texts::texts(root)?;
    violations.extend(texts::check(root, &texts)?);
    violations.extend(LongFunctions::measure(&texts).check(root)?);
    let sources = texts.iter().filter(|(path, _)| path.ends_with(".rs"));
    violations.extend(circles::check(sources.map(|(path, text)| (path.as_str(), text.as_str()))));
    violations.sort();
    Ok(violations)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        let violations = check(&crate::workspace_root().unwrap()).unwrap();
        let lines: Vec<_> = violations.iter().map(ToString::to_string).collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }
}
