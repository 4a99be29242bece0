//! Output: data to stdout, messages to stderr, and formatting.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Exit code of a failed launch.
pub(crate) const FAILED: u8 = 1;
/// Exit code for unusable arguments or files.
pub(crate) const UNUSABLE: u8 = 2;

/// Prints data. A closed pipe, as by `head`, is not an error.
pub(crate) fn print(text: &dyn Display) -> Result<()> {
    let mut stdout = io::BufWriter::new(io::stdout().lock());
    match write!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to stdout"),
    }
}

/// Prints data as one JSON document.
pub(crate) fn print_json(data: &serde_json::Value) -> Result<()> {
    print(&format_args!("{data:#}\n"))
}

/// Prints to stderr.
pub(crate) fn say(text: impl Display) {
    // A closed stderr cannot be reported.
    let _ = writeln!(io::stderr(), "{text}");
}

/// Formats an error with its causes.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let mut text = String::from("error: ");
    for (depth, cause) in error.chain().enumerate() {
        if depth > 0 {
            text.push_str("\n  caused by: ");
        }
        text.push_str(&cause.to_string());
    }
    text
}

/// Formats a count in groups of three digits: `3,082,496`.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Creates a progress bar on stderr, visible only on a terminal.
pub(crate) fn progress(total: usize) -> ProgressBar {
    let target = match io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(total as u64), target);
    match ProgressStyle::with_template("[{bar:30}] {pos}/{len} {elapsed} {msg}") {
        Ok(style) => bar.with_style(style.progress_chars("=  ")),
        Err(_) => bar,
    }
}

/// Collects launch files: the given files, and all `.toml` files in and below given folders.
pub(crate) fn launch_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() {
            let before = files.len();
            in_folder(path, &mut files)?;
            files[before..].sort();
            if files.len() == before {
                bail!("expected `.toml` files in {}, found none", path.display());
            }
        } else {
            files.push(path.clone());
        }
    }
    Ok(files)
}

fn in_folder(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let unreadable = || format!("cannot read {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(unreadable)? {
        let path = entry.with_context(unreadable)?.path();
        if path.is_dir() {
            in_folder(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "toml") {
            files.push(path);
        }
    }
    Ok(())
}
