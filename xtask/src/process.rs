//! Starts other programs.

use std::env;
use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

/// Returns the cargo that started this program, or `cargo` from the path.
pub(crate) fn cargo() -> OsString {
    env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// Replaces this process with `command`, so that signals and the exit code reach and come from the
/// command directly. Returns only if the command cannot be started.
#[cfg(unix)]
pub(crate) fn hand_over(mut command: Command) -> Result<ExitCode> {
    use std::os::unix::process::CommandExt;

    let error = command.exec();
    Err(error).with_context(|| format!("cannot start `{}`", command.get_program().display()))
}

/// Runs `command` and returns its exit code.
#[cfg(not(unix))]
pub(crate) fn hand_over(mut command: Command) -> Result<ExitCode> {
    let status = command
        .status()
        .with_context(|| format!("cannot start `{}`", command.get_program().display()))?;
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(ExitCode::from(code))
}
