//! `deepwell ckpt inspect`, `verify` and `diff`; `fits` is in ckpt_fits.rs.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use deepwell_ckpt::{CheckpointDiff, VerifyReport, diff, inspect, verify};
use serde::Serialize;

use crate::Outcome;
use crate::checkpoint_path::{Wanted, find};
use crate::ckpt_fits::{self, FitsArgs};
use crate::output::{note, print, print_json};

/// Inspect, verify and compare checkpoints
#[derive(Args, Debug)]
pub(crate) struct CkptArgs {
    #[command(subcommand)]
    command: CkptCommand,
}

#[derive(Debug, Subcommand)]
enum CkptCommand {
    Inspect(InspectArgs),
    Verify(VerifyArgs),
    Diff(DiffArgs),
    Fits(FitsArgs),
}

const INSPECT_AFTER_HELP: &str = "\
PATH is one checkpoint (`step-00000120`), a folder of checkpoints, or the output folder of a run. In
a folder the newest complete checkpoint is used.

Examples:
  deepwell ckpt inspect target/deepwell-run
  deepwell ckpt inspect target/deepwell-run/checkpoints/step-00000120 --tensors
  deepwell ckpt inspect target/deepwell-run --json

Exit codes: 0 shown, 2 not a checkpoint, or a damaged one";

/// Show the contents of a checkpoint without reading its tensors
#[derive(Args, Debug)]
#[command(after_help = INSPECT_AFTER_HELP)]
struct InspectArgs {
    /// Checkpoint, folder of checkpoints, or output folder of a run
    path: PathBuf,
    /// List every tensor
    #[arg(long)]
    tensors: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const VERIFY_AFTER_HELP: &str = "\
Compares the checksum of every tensor and every file, and the header of each file with the manifest.
Lists each damaged place. In a folder of checkpoints the newest one is verified, complete or not.

Examples:
  deepwell ckpt verify target/deepwell-run
  deepwell ckpt verify target/deepwell-run/checkpoints/step-00000120 --json

A missing, truncated, extended or changed file is damage, whether a shard, the manifest or the
manifest's checksum.

Exit codes: 0 intact, 1 damaged, 2 not a checkpoint";

/// Read a whole checkpoint and compare all checksums
#[derive(Args, Debug)]
#[command(after_help = VERIFY_AFTER_HELP)]
struct VerifyArgs {
    /// Checkpoint, folder of checkpoints, or output folder of a run
    path: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const DIFF_AFTER_HELP: &str = "\
Lists tensors in only one checkpoint and tensors with another shape or element type. For tensors
with other values, prints the number of different elements, the largest difference, and the norm of
the difference relative to the norm of A's tensor. Then lists differences in step, plan, policy,
guards and settings. Tensors with equal checksums are not read; others are read 2 MiB at a time.

A and B are checkpoints, or folders whose newest complete checkpoint is used.

Examples:
  deepwell ckpt diff runs/a runs/b
  deepwell ckpt diff runs/a/checkpoints/step-00000400 runs/a/checkpoints/step-00000800
  deepwell ckpt diff runs/whole runs/resumed --tensors     ignore settings such as the folder
  deepwell ckpt diff runs/a runs/b --json

Exit codes: 0 equal, 1 different, 2 not a checkpoint, or a damaged one";

/// Show the differences between two checkpoints
#[derive(Args, Debug)]
#[command(after_help = DIFF_AFTER_HELP)]
struct DiffArgs {
    /// First checkpoint, folder of checkpoints, or output folder of a run
    a: PathBuf,
    /// Second checkpoint, folder of checkpoints, or output folder of a run
    b: PathBuf,
    /// Compare tensors only, not step, settings and state
    #[arg(long)]
    tensors: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CkptArgs) -> Result<Outcome> {
    match &args.command {
        CkptCommand::Inspect(args) => run_inspect(args),
        CkptCommand::Verify(args) => run_verify(args),
        CkptCommand::Diff(args) => run_diff(args),
        CkptCommand::Fits(args) => ckpt_fits::run(args),
    }
}

fn run_inspect(args: &InspectArgs) -> Result<Outcome> {
    let inspection = inspect(&find(&args.path, Wanted::NewestComplete)?)?;
    if args.json {
        print_json(&inspection)?;
    } else if args.tensors {
        print(&format_args!("{inspection:#}"))?;
    } else {
        print(&inspection)?;
    }
    Ok(Outcome::Success)
}

/// Output of `ckpt verify --json`.
#[derive(Debug, Serialize)]
struct Verification {
    path: PathBuf,
    sound: bool,
    /// Result of reading the tensors; null if the manifest or the length of a file is already
    /// wrong.
    report: Option<VerifyReport>,
    /// Why nothing was read.
    refused: Option<String>,
}

fn run_verify(args: &VerifyArgs) -> Result<Outcome> {
    let path = find(&args.path, Wanted::Newest)?;
    let verification = match verify(&path) {
        Ok(report) => {
            Verification { path, sound: report.is_sound(), report: Some(report), refused: None }
        }
        Err(error) if error.is_damage() => {
            Verification { path, sound: false, report: None, refused: Some(error.to_string()) }
        }
        Err(error) => return Err(error.into()),
    };
    if args.json {
        print_json(&verification)?;
    } else if let Some(report) = &verification.report {
        print(report)?;
    } else if let Some(refused) = &verification.refused {
        let indented = refused.replace('\n', "\n  ");
        print(&format_args!("damaged: `{}`\n  {indented}\n", verification.path.display()))?;
    }
    if verification.sound {
        return Ok(Outcome::Success);
    }
    note(format_args!("checkpoint `{}` is damaged", verification.path.display()));
    Ok(Outcome::Failed)
}

/// Output of `ckpt diff --json`.
#[derive(Debug, Serialize)]
struct Difference {
    equal: bool,
    #[serde(flatten)]
    diff: CheckpointDiff,
}

fn run_diff(args: &DiffArgs) -> Result<Outcome> {
    let a = find(&args.a, Wanted::NewestComplete)?;
    let b = find(&args.b, Wanted::NewestComplete)?;
    let mut diff = diff(&a, &b)?;
    let equal = if args.tensors {
        diff.sections.clear();
        diff.has_equal_tensors()
    } else {
        diff.is_equal()
    };
    if args.json {
        print_json(&Difference { equal, diff })?;
    } else {
        let verdict = if equal { "equal" } else { "different" };
        print(&format_args!("{verdict}\n{diff}"))?;
    }
    Ok(if equal { Outcome::Success } else { Outcome::Failed })
}
