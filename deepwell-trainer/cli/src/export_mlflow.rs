//! `deepwell export mlflow`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use deepwell_runs::{mlflow, read_runs};

use crate::Outcome;
use crate::output::{grouped, note, print, print_json};

const AFTER_HELP: &str = "\
RUN is the output folder of `deepwell train`, or a folder above such folders. STORE gets an
experiment with a run for each: all values of metrics.jsonl with their times, the settings as
parameters, hardware and state as tags, report.html and the JSON files as artifacts. A run keeps
its id, and a run that the store has already is an error before anything is written.

MLflow 3 opens a file store with MLFLOW_ALLOW_FILE_STORE=true; `mlflow migrate-filestore` moves the
runs to a database.

Examples:
  deepwell export mlflow runs/book                      into ./mlruns, experiment deepwell
  deepwell export mlflow runs --to /data/mlruns --experiment 'learning rates'
  deepwell export mlflow target/parity --json

Exit codes: 0 written, 2 a folder has no run, the store has the run, or the output cannot be
written";

/// Export runs to MLflow's file store
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct MlflowArgs {
    /// Output folders of runs, or folders above them
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Folder of the file store
    #[arg(long, value_name = "STORE", default_value = "mlruns")]
    to: PathBuf,
    /// Name of the experiment; a new name makes a new experiment
    #[arg(long, value_name = "NAME", default_value = "deepwell")]
    experiment: String,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &MlflowArgs) -> Result<Outcome> {
    let runs = read_runs(&args.runs)?;
    for run in &runs {
        run.notes.iter().for_each(|text| note(format_args!("{}: {text}", run.name)));
    }
    let exported = mlflow::export(&runs, &args.to, &args.experiment)?;
    if args.json {
        print_json(&exported)?;
        return Ok(Outcome::Success);
    }
    for run in &exported {
        let points = grouped(run.points as u64);
        print(&format_args!(
            "{}: {} metrics, {points} points, {} parameters\n  {}\n",
            run.run,
            run.metrics,
            run.params,
            run.folder.display()
        ))?;
    }
    Ok(Outcome::Success)
}
