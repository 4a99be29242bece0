//! `deepwell corpus`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use deepwell_trainer::data::export_default_corpus;

use crate::Outcome;
use crate::output::{grouped, print, print_json};

/// Write the default corpus (sources of the locked dependencies) to a folder
#[derive(Args, Debug)]
#[command(hide = true)]
pub(crate) struct CorpusArgs {
    /// Folder to write to
    out: PathBuf,
    /// Cargo workspace whose locked dependencies are written
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    workspace: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &CorpusArgs) -> Result<Outcome> {
    let made = export_default_corpus(&args.workspace, &args.out)?;
    if args.json {
        print_json(&made)?;
    } else {
        let bytes = grouped(made.text_bytes);
        let files = grouped(made.files as u64);
        print(&format_args!("{bytes} bytes of text in {files} files\n"))?;
    }
    Ok(Outcome::Success)
}
