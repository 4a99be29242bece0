//! `cargo xtask parity|train|probe`: builds the release binary and becomes it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use xshell::{Shell, cmd};

use crate::process::{cargo, hand_over};

pub(crate) fn run(
    shell: &Shell,
    root: &Path,
    subcommand: &str,
    args: &[OsString],
) -> Result<ExitCode> {
    let binary = build(shell)?;
    let mut command = Command::new(binary);
    command.arg(subcommand).args(args).current_dir(root);
    hand_over(command)
}

/// Builds `deepwell` and returns where it is. Cargo's progress goes to the terminal.
fn build(shell: &Shell) -> Result<PathBuf> {
    let cargo = cargo();
    // The default corpus is the sources of every locked package, also of those that this build
    // does not need.
    cmd!(shell, "{cargo} fetch --locked --quiet")
        .quiet()
        .run()
        .context("the locked packages cannot be fetched; cargo's message is above")?;
    // Cargo itself says where the binary is: the user may have set another target directory.
    let messages = cmd!(
        shell,
        "{cargo} build --release --package deepwell-trainer --bin deepwell
         --message-format json-render-diagnostics"
    )
    .quiet()
    .read()
    .context("`deepwell` does not build; cargo's message is above")?;
    let executable = messages.lines().rev().find_map(executable_in);
    let executable = executable.context("cargo built `deepwell` and did not say where")?;
    Ok(PathBuf::from(executable))
}

/// The value of `"executable"` in one of cargo's messages, if it has one that is not null.
fn executable_in(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("\"executable\":\"")?;
    let mut value = String::new();
    let mut characters = rest.chars();
    loop {
        match characters.next()? {
            '"' => return Some(value),
            '\\' => value.push(characters.next()?),
            character => value.push(character),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_in_cargo_messages() {
        let check = |message: &str, expected: Option<&str>| {
            assert_eq!(executable_in(message).as_deref(), expected, "{message}");
        };
        check(
            r#"{"reason":"x","executable":"/t/release/deepwell","fresh":true}"#,
            Some("/t/release/deepwell"),
        );
        check(r#"{"executable":"C:\\t\\deepwell.exe"}"#, Some("C:\\t\\deepwell.exe"));
        check(r#"{"reason":"x","executable":null}"#, None);
        check(r#"{"reason":"build-finished","success":true}"#, None);
    }
}
