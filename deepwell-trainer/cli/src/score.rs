//! `deepwell score`.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use deepwell_score::{Scored, TABLES, figure, score};

use crate::Outcome;
use crate::output::{print, print_json};

const AFTER_HELP: &str = "\
Predicts each row of a table from its configuration and compares the prediction with the
measurement. The columns of a table determine its kind: pipeline bubbles, peak memory in
Megatron-LM's accounting, step times, or throughput with FSDP. Without FILE, scores the tables in
the repository's deepwell-plan/score/scores/, which names their sources.

Examples:
  deepwell score
  deepwell score my_runs.csv
  deepwell score my_runs.csv --csv > rows.csv

Exit codes: 0 scored, 2 a table cannot be read";

/// Score the planner's predictions against tables of measurements
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ScoreArgs {
    /// CSV tables of measurements [default: the repository's tables]
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Print prediction, measurement and error of each row as CSV
    #[arg(long)]
    csv: bool,
    /// Plot predictions over measurements as SVG, one panel per table
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,
}

pub(crate) fn run(args: &ScoreArgs) -> Result<Outcome> {
    let tables: Vec<Scored> = if args.files.is_empty() {
        TABLES.iter().map(|(name, text)| score(name, text)).collect::<Result<_, _>>()?
    } else {
        args.files.iter().map(scored_file).collect::<Result<_>>()?
    };
    if let Some(path) = &args.svg {
        std::fs::write(path, figure(&tables))
            .with_context(|| format!("cannot write `{}`", path.display()))?;
    }
    if args.json {
        print_json(&tables)?;
        return Ok(Outcome::Success);
    }
    let mut text = String::new();
    for (index, table) in tables.iter().enumerate() {
        if args.csv {
            let rows = table.csv();
            // One header for all tables.
            let start = if index == 0 { 0 } else { rows.find('\n').map_or(0, |end| end + 1) };
            text += &rows[start..];
        } else {
            text += &format!("{table}");
        }
    }
    print(&text)?;
    Ok(Outcome::Success)
}

fn scored_file(path: &PathBuf) -> Result<Scored> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).with_context(|| format!("cannot read `{name}`"))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let good = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + good.iter().filter(|&&byte| byte == b'\n').count();
        anyhow!("{name}, line {line}: expected UTF-8 text")
    })?;
    Ok(score(&name, &text)?)
}
