//! `cargo xtask bench`: the benchmark targets of the crates that compute.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::process::{cargo, hand_over};

const PACKAGES: [&str; 2] = ["deepwell-precision", "deepwell-kernels"];

pub(crate) fn run(root: &Path, args: &[OsString]) -> Result<ExitCode> {
    let mut command = Command::new(cargo());
    command.arg("bench").current_dir(root);
    for package in PACKAGES {
        command.args(["--package", package]);
    }
    // Only files in `benches/`: without this the unit tests would be run as benchmarks too.
    command.args(["--bench", "*"]);
    if !args.is_empty() {
        command.arg("--").args(args);
    }
    hand_over(command)
}
