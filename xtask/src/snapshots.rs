//! `cargo xtask snapshots`: runs the snapshot tests and shows, accepts or rejects changes.
//!
//! Replaces `cargo insta review` without installing a tool. Snapshots are files (`*.snap`); a
//! changed snapshot appears next to the old file as `*.snap.new`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

use crate::packages::packages;
use crate::process::cargo;
use crate::source::files;

enum Action {
    Review,
    Accept,
    Reject,
}

pub(crate) fn run(shell: &Shell, root: &Path, args: &[OsString]) -> Result<ExitCode> {
    let args: Vec<_> = args.iter().map(|arg| arg.to_string_lossy()).collect();
    let args: Vec<&str> = args.iter().map(|arg| &**arg).collect();
    let action = match args[..] {
        [] => Action::Review,
        ["--accept"] => Action::Accept,
        ["--reject"] => Action::Reject,
        _ => bail!("expected nothing, `--accept` or `--reject`, got `{}`", args.join(" ")),
    };
    if !matches!(action, Action::Reject) {
        run_tests(shell, root)?;
    }
    let pending = pending_snapshots(root)?;
    for new in &pending {
        let old = new.with_extension("");
        match action {
            Action::Review => show(shell, &old, new)?,
            Action::Accept => {
                fs::rename(new, &old)
                    .with_context(|| format!("cannot accept {}", new.display()))?;
                println!("accepted {}", old.display());
            }
            Action::Reject => {
                fs::remove_file(new).with_context(|| format!("cannot reject {}", new.display()))?;
                println!("rejected {}", new.display());
            }
        }
    }
    match (action, pending.len()) {
        (_, 0) => println!("no snapshot changed"),
        (Action::Review, count) => {
            println!("{count} changed");
            println!("hint: `cargo xtask snapshots --accept` takes them, `--reject` drops them");
            return Ok(ExitCode::FAILURE);
        }
        _ => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs the tests of every crate that uses insta; insta writes each changed snapshot.
fn run_tests(shell: &Shell, root: &Path) -> Result<()> {
    let mut arguments = Vec::new();
    for package in packages(root)? {
        if package.dependencies.iter().any(|dependency| dependency.name == "insta") {
            arguments.extend(["--package".to_string(), package.name]);
        }
    }
    if arguments.is_empty() {
        return Ok(());
    }
    let cargo = cargo();
    cmd!(shell, "{cargo} test {arguments...}")
        .env("INSTA_UPDATE", "new")
        // A test continues after its first changed snapshot, so that all changes are written.
        .env("INSTA_FORCE_PASS", "1")
        .run()
        .context("the tests fail for another reason than a changed snapshot")
}

fn pending_snapshots(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for package in packages(root)? {
        for file in files(&package.folder)? {
            if file.to_string_lossy().ends_with(".snap.new") {
                found.push(file);
            }
        }
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn show(shell: &Shell, old: &Path, new: &Path) -> Result<()> {
    let before = if old.exists() { old } else { Path::new("/dev/null") };
    // Exit code 1 means that the files differ.
    cmd!(shell, "git --no-pager diff --no-index {before} {new}")
        .quiet()
        .ignore_status()
        .run()
        .context("cannot run `git diff`")
}
