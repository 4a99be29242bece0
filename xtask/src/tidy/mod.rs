//! `cargo xtask tidy`: the rules of the repository that a program can check.
//!
//! Each message says what to do instead. The rules run in `cargo test -p xtask` as well.

mod cuda;
mod docs;
mod environment;
mod manifests;
mod names;
mod texts;
mod trees;

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail};

/// A place where a rule is broken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Violation {
    /// Relative to the workspace root, with forward slashes.
    path: String,
    /// Counted from 1; 0 for the file as a whole.
    line: usize,
    /// What is wrong and what to do instead.
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
    if let Some(arg) = args.first() {
        bail!("`tidy` takes no arguments, got `{}`", arg.display());
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

/// Every broken rule in the workspace at `root`, sorted by place.
fn check(root: &Path) -> Result<Vec<Violation>> {
    let mut violations = manifests::check(root)?;
    violations.extend(texts::check(root)?);
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
