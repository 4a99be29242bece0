//! `deepwell-emulate run`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use deepwell_emulator::launch_file::PreparedLaunch;
use serde_json::json;

use crate::modes::ModeArgs;
use crate::output::{launch_files, print, print_json};
use crate::{json, text};

/// Run launches and say what they did
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Launch files, or folders of them
    #[arg(required = true, value_name = "FILE.toml")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    modes: ModeArgs,
    /// Print the first N instructions of warps as they ran
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "1000")]
    trace: Option<usize>,
    /// One JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// Runs every file in every mode. Returns whether all were right.
pub(crate) fn run(args: &RunArgs) -> Result<bool> {
    let mut all_right = true;
    let mut documents = Vec::new();
    for path in launch_files(&args.files)? {
        let launch = PreparedLaunch::read(&path)?;
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
