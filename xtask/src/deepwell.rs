//! `cargo xtask parity|train|bench|tune|probe|score`: builds the release binary and executes it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::cargo_messages;
use crate::process::{cargo, hand_over};

pub(crate) fn run(
    shell: &Shell,
    root: &Path,
    subcommand: &str,
    args: &[OsString],
) -> Result<ExitCode> {
    let binary = build(shell, root)?;
    let mut command = Command::new(binary);
    command.arg(subcommand).args(args).current_dir(root);
    hand_over(command)
}

/// Builds `deepwell` and returns its path. Cargo's progress goes to the terminal.
pub(crate) fn build(shell: &Shell, root: &Path) -> Result<PathBuf> {
    let cargo = cargo();
    // The default corpus is the sources of every locked package, including packages that this build
    // does not need.
    cmd!(shell, "{cargo} fetch --locked --quiet")
        .quiet()
        .run()
        .context("the locked packages cannot be fetched; cargo's message is above")?;
    // Cargo's messages name the binary: the user may have set another target directory.
    let messages = cmd!(
        shell,
        "{cargo} build --release --package deepwell-cli --bin deepwell
         --message-format json-render-diagnostics"
    )
    .env("DEEPWELL_COMMIT", commit(shell))
    .quiet()
    .read()
    .context("`deepwell` does not build; cargo's message is above")?;
    let folder = root.join("deepwell-trainer/cli");
    let executable = cargo_messages::executable(&messages, &folder, "bin", "deepwell");
    executable.context("cargo built `deepwell` and did not say where")
}

/// Returns the commit for records of benchmarks, which may be made on a machine without the
/// repository.
fn commit(shell: &Shell) -> String {
    let described = cmd!(shell, "git describe --always --dirty --exclude *").quiet().read();
    described.unwrap_or_else(|_| "unknown".to_string())
}
