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

/// Look into checkpoints
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
PATH is one checkpoint (`step-00000120`), a folder of checkpoints, or the output folder of a run;
of several the newest complete one is taken.

Examples:
  deepwell ckpt inspect target/deepwell-run
  deepwell ckpt inspect target/deepwell-run/checkpoints/step-00000120 --tensors
  deepwell ckpt inspect target/deepwell-run --json

Exit codes: 0 shown, 2 not a checkpoint, or a damaged one";

/// Show what a checkpoint holds, without reading its tensors
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
Compares the checksum of every tensor and of every file, and each file's own header with the
manifest; names each damaged place. Of a folder of checkpoints the newest is verified.

Examples:
  deepwell ckpt verify target/deepwell-run
  deepwell ckpt verify target/deepwell-run/checkpoints/step-00000120 --json

A file that is missing, cut, longer or changed is damage, whether it is a shard, the manifest or the
manifest's checksum.

Exit codes: 0 sound, 1 damaged, 2 not a checkpoint";

/// Read every byte of a checkpoint and compare all checksums
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
Names tensors that only one of the two has, tensors of another shape or element type, and of those
with other values how many elements differ, the largest difference, and the length of the difference
over the length of A's tensor; then where step, plan, policy, guards and settings differ. Tensors of
equal checksums are not read; the others are, 2 MiB at a time, however large they are.

A and B are checkpoints, or folders of which the newest complete one is taken.

Examples:
  deepwell ckpt diff runs/a runs/b
  deepwell ckpt diff runs/a/checkpoints/step-00000400 runs/a/checkpoints/step-00000800
  deepwell ckpt diff runs/whole runs/resumed --tensors     must be equal: their folders differ
  deepwell ckpt diff runs/a runs/b --json

Exit codes: 0 equal, 1 different, 2 not a checkpoint, or a damaged one";

/// Show what differs between two checkpoints
#[derive(Args, Debug)]
#[command(after_help = DIFF_AFTER_HELP)]
struct DiffArgs {
    /// First checkpoint, folder of checkpoints, or output folder of a run
    a: PathBuf,
    /// Second one
    b: PathBuf,
    /// Compare tensors alone: steps, settings and state may differ
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
