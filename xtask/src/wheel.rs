//! `cargo xtask wheel`: builds the libraries of the kernels and of the trainer, and packs them with
//! the Python package `deepwell`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::arguments::{Takes, flags};
use crate::process::{cargo, hand_over};

const HELP: &str = "\
Build a wheel of the Python package `deepwell` in target/wheels/

Usage: cargo xtask wheel [FLAGS]

Flags:
  --kernels DIR  compiled kernels to put in (target/kernels of `cargo xtask kernels`)
  --no-kernels   no kernels: the wheel runs on CPUs only
  --out DIR      where to write the wheel (target/wheels)

The wheel is py3-none-manylinux_2_28: one file for every Python and PyTorch, on systems from
RHEL 8 on. Needs python3 with pip; Zig's linker, which knows old versions of glibc, is installed
from PyPI in target/zig.
";

/// Zig, whose linker takes the version of glibc to link against.
const ZIG: &str = "ziglang==0.17.1";
const GLIBC_TARGET: &str = "x86_64-linux-gnu.2.28";

/// Flag of `build_wheel.py`, package and file of each library in a wheel.
const LIBRARIES: [(&str, &str, &str); 2] = [
    ("--library", "deepwell-capi", "libdeepwell.so"),
    ("--engine", "deepwell-engine", "libdeepwell_engine.so"),
];

pub(crate) fn run(shell: &Shell, root: &Path, arguments: &[OsString]) -> Result<ExitCode> {
    if arguments.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{HELP}");
        return Ok(ExitCode::SUCCESS);
    }
    let mut kernels = Some(root.join("target/kernels"));
    let mut out = root.join("target/wheels");
    let known =
        [("--kernels", Takes::Value), ("--no-kernels", Takes::Nothing), ("--out", Takes::Value)];
    for (flag, value) in flags("wheel", arguments, &known)? {
        match flag {
            "--kernels" => kernels = Some(PathBuf::from(value)),
            "--no-kernels" => kernels = None,
            _ => out = PathBuf::from(value),
        }
    }
    let linker = linker(shell, root)?;
    let mut command = Command::new("python3");
    command.current_dir(root).arg("deepwell-kernels/python/build_wheel.py");
    for (flag, package, file) in LIBRARIES {
        command.arg(flag).arg(build(shell, &linker, package, file)?);
    }
    command.arg("--out").arg(out);
    if let Some(kernels) = kernels {
        command.arg("--kernels").arg(kernels);
    }
    hand_over(command)
}

/// Installs the linker if it is missing, and returns a program that rustc can call as `cc`.
fn linker(shell: &Shell, root: &Path) -> Result<PathBuf> {
    let folder = root.join("target/zig");
    let linker = folder.join("cc");
    let content = format!(
        "#!/bin/sh\nPYTHONPATH='{}' exec python3 -m ziglang cc -target {GLIBC_TARGET} \"$@\"\n",
        folder.display()
    );
    if fs::read_to_string(&linker).is_ok_and(|found| found == content) {
        return Ok(linker);
    }
    eprintln!("installing {ZIG} in target/zig");
    cmd!(
        shell,
        "python3 -m pip install --quiet --root-user-action ignore --upgrade --target {folder} {ZIG}"
    )
    .quiet()
    .run()
    .context("the linker cannot be installed; pip's message is above")?;
    fs::write(&linker, content).with_context(|| format!("cannot write {}", linker.display()))?;
    cmd!(shell, "chmod +x {linker}").quiet().run()?;
    Ok(linker)
}

/// Builds a library and returns its path. Cargo's progress goes to the terminal.
fn build(shell: &Shell, linker: &Path, package: &str, file: &str) -> Result<PathBuf> {
    let cargo = cargo();
    // Flags after `--` reach this crate alone, so the dependencies are those of other builds.
    let messages = cmd!(
        shell,
        "{cargo} rustc --release --locked --package {package} --lib --crate-type cdylib
         --message-format json-render-diagnostics -- -C linker={linker}"
    )
    .quiet()
    .read()
    .with_context(|| format!("`{package}` does not build; cargo's message is above"))?;
    library(&messages, file).with_context(|| format!("cargo built `{package}` and hid the file"))
}

/// Returns the shared library of this name in cargo's messages.
fn library(messages: &str, file: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter_map(|message| message.get("filenames")?.as_array().cloned())
        .flatten()
        .filter_map(|name| name.as_str().map(PathBuf::from))
        .find(|path| path.file_name().is_some_and(|name| name == file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_among_messages() {
        let check = |messages: &str, expected: Option<&str>| {
            assert_eq!(
                library(messages, "libdeepwell.so"),
                expected.map(PathBuf::from),
                "{messages}"
            );
        };
        check("", None);
        check(r#"{"filenames":["/t/libdeepwell_ir.rlib","/t/libdeepwell.rlib"]}"#, None);
        check("text\n{\"reason\":\"build-finished\"}", None);
        check(
            r#"{"filenames":["/t/libdeepwell.rlib","/t/libdeepwell.so"]}"#,
            Some("/t/libdeepwell.so"),
        );
        let both = r#"{"filenames":["/t/libdeepwell_engine.so"]}"#;
        check(both, None);
    }
}
