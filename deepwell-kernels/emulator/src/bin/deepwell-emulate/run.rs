//! `deepwell-emulate run`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use deepwell_emulator::launch_file::PreparedLaunch;
use serde_json::json;

use crate::modes::ModeArgs;
use crate::mutate::groups;
use crate::output::{launch_files, print, print_json};
use crate::{json, text};

/// Run launches and check results and hazards
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    launches: LaunchArgs,
    #[command(flatten)]
    modes: ModeArgs,
    /// Print the first N executed warp instructions (1000 without N)
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1000")]
    trace: Option<usize>,
    /// Print one JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// Launches of a command.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Launch files, or folders of launch files
    #[arg(required = true, value_name = "FILE.toml")]
    files: Vec<PathBuf>,
    /// Run every launch of a folder, not only the largest launch of each kernel within `--largest`
    #[arg(long)]
    every: bool,
    /// Maximum number of warp instructions of a folder's launches; the smallest launch of a kernel
    /// always qualifies
    #[arg(long, value_name = "N", default_value_t = 5_000_000)]
    largest: u64,
}

/// Runs every launch in every mode. Returns whether all outcomes are right.
pub(crate) fn run(args: &RunArgs) -> Result<bool> {
    let mut all_right = true;
    let mut documents = Vec::new();
    for launch in launches(&args.launches)? {
        for mode in args.modes.modes() {
            let settings = args.modes.settings(mode, &launch, args.trace.unwrap_or(0));
            let outcome = launch.run(&settings);
            all_right &= outcome.is_right();
            match args.json {
                true => documents.push(json::outcome(&launch, &settings, &outcome)),
                false => print(&text::outcome(&launch, &settings, &outcome))?,
            }
        }
    }
    if args.json {
        print_json(&json!({ "right": all_right, "runs": documents }))?;
    }
    Ok(all_right)
}

/// Returns the launches: given files in order, and for a folder one launch per kernel, or all.
pub(crate) fn launches(args: &LaunchArgs) -> Result<Vec<PreparedLaunch>> {
    let mut launches = Vec::new();
    for path in &args.files {
        let paths = std::slice::from_ref(path);
        if path.is_dir() && !args.every {
            for group in groups(paths, None)? {
                launches.push(group.largest(args.largest)?);
            }
        } else {
            for path in launch_files(paths)? {
                launches.push(PreparedLaunch::read(&path)?);
            }
        }
    }
    Ok(launches)
}
