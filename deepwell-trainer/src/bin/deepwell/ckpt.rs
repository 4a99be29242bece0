//! `deepwell ckpt inspect` and `deepwell ckpt verify`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Args, Subcommand};
use deepwell_ckpt::{CheckpointError, VerifyReport, inspect, scan, verify};
use serde::Serialize;

use crate::Outcome;
use crate::output::{note, print, print_json};

/// The file that makes a folder a checkpoint.
const MANIFEST_FILE: &str = "manifest.json";
/// The folder for checkpoints inside a run's output folder.
const CHECKPOINTS_FOLDER: &str = "checkpoints";

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
}

const INSPECT_AFTER_HELP: &str = "\
PATH is one checkpoint (`step-00000120`), a folder of checkpoints, or the output folder of a run;
of several the newest complete one is taken.

Examples:
  deepwell ckpt inspect target/deepwell-run
  deepwell ckpt inspect target/deepwell-run/checkpoints/step-00000120 --tensors
  deepwell ckpt inspect target/deepwell-run --json";

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

pub(crate) fn run(args: &CkptArgs) -> Result<Outcome> {
    match &args.command {
        CkptCommand::Inspect(args) => run_inspect(args),
        CkptCommand::Verify(args) => run_verify(args),
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

/// What `ckpt verify --json` prints.
#[derive(Debug, Serialize)]
struct Verification {
    path: PathBuf,
    sound: bool,
    /// What was read; null where the manifest or the length of a file is wrong already.
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
        Err(error) if is_damage(&error) => {
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

/// Whether an error says that a checkpoint is there and no longer as it was written.
fn is_damage(error: &CheckpointError) -> bool {
    matches!(
        error,
        CheckpointError::ManifestChecksum { .. }
            | CheckpointError::ManifestInvalid { .. }
            | CheckpointError::FileLength { .. }
            | CheckpointError::TensorChecksum { .. }
    )
}

/// Which checkpoint of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// The newest that can be loaded.
    NewestComplete,
    /// The newest, damaged or not.
    Newest,
}

/// The checkpoint that a path means.
fn find(path: &Path, wanted: Wanted) -> Result<PathBuf> {
    if path.join(MANIFEST_FILE).exists() || !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let inner = path.join(CHECKPOINTS_FOLDER);
    let root = if inner.is_dir() { inner } else { path.to_path_buf() };
    let listing = scan(&root)?;
    for damaged in &listing.damaged {
        note(format_args!("`{}` is damaged: {}", damaged.path.display(), damaged.reason));
    }
    let complete = listing.complete.last().map(|entry| (entry.step, &entry.path));
    let damaged = listing.damaged.last().map(|entry| (entry.step, &entry.path));
    let newest = match wanted {
        Wanted::NewestComplete => complete,
        Wanted::Newest => complete.max(damaged),
    };
    match newest {
        Some((_, path)) => Ok(path.clone()),
        None if listing.damaged.is_empty() => bail!(
            "`{}`: expected a checkpoint or a folder of checkpoints, found neither\n\
             hint: a run writes its checkpoints to `{CHECKPOINTS_FOLDER}` in its output folder",
            path.display()
        ),
        None => bail!("`{}`: every checkpoint in it is damaged", root.display()),
    }
}
