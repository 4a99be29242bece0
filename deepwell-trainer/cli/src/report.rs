//! `deepwell report`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use deepwell_runs::{Run, RunRow, dashboard, markdown, read_runs};

use crate::output::{note, print, print_json, say};
use crate::{Outcome, serve};

/// Longest wait for Ctrl-C.
const POLL: Duration = Duration::from_millis(100);

const AFTER_HELP: &str = "\
RUN is the output folder of `deepwell train`, or a folder above such folders, as that of
`deepwell parity`. A run may still be training, may have been killed, or may be of an earlier
version; the page says what its folder lacks.

The page is one file that loads nothing: curves over steps, tokens or time, with filter, zoom and
smoothing; a table of runs with loss, speed, MFU, goodput and memory; the settings that differ;
and for each run memory by kind, precision by layer, routing, guard events and hardware. Long
curves are thinned, and of each interval the lowest and the highest value stay.

Live: with --refresh the command writes the page again every SECONDS until Ctrl-C, and a browser
loads the page as often. --serve reads the runs at each request and listens on 127.0.0.1 only.

Examples:
  deepwell report runs/a runs/b --out compare.html      one page over two runs
  deepwell report runs --title 'Learning rates'         all runs below a folder
  deepwell report target/parity                         the runs of `deepwell parity`
  deepwell report runs --markdown >> README.md          a table for a README
  deepwell report runs --json                           the table for programs
  deepwell report runs --serve --refresh 10             live, at http://127.0.0.1:8020/
  deepwell report runs --refresh 30                     live, as the file runs.html

Exit codes: 0 written, or the server was stopped, 2 a folder has no run, or the page cannot be
written";

/// Make one page over many runs: curves, settings that differ, memory, precision, events
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ReportArgs {
    /// Output folders of runs, or folders above them
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<PathBuf>,
    /// Page to write
    #[arg(long, value_name = "FILE", default_value = "runs.html")]
    out: PathBuf,
    /// Title of the page
    #[arg(long, default_value = "Runs")]
    title: String,
    /// Print a Markdown table on stdout in place of the page
    #[arg(long, conflicts_with_all = ["json", "serve", "refresh", "out"])]
    markdown: bool,
    /// Print the table of runs as JSON on stdout in place of the page
    #[arg(long, conflicts_with_all = ["serve", "refresh", "out"])]
    json: bool,
    /// Serve the page on this machine in place of writing a file; Ctrl-C ends the server
    #[arg(long, conflicts_with = "out")]
    serve: bool,
    /// Port of --serve; 0 takes a free one
    #[arg(long, requires = "serve", default_value_t = 8020)]
    port: u16,
    /// Load the page again every SECONDS; without --serve the command also writes it as often
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    refresh: Option<u64>,
}

pub(crate) fn run(args: &ReportArgs) -> Result<Outcome> {
    let runs = read_runs(&args.runs)?;
    if args.json {
        print_json(&runs.iter().map(RunRow::of).collect::<Vec<_>>())?;
    } else if args.markdown {
        print(&markdown(&runs))?;
    } else if args.serve {
        tell_notes(&runs);
        let page = |runs: &[Run]| dashboard(runs, &args.title, args.refresh).to_html();
        let stop = stop_flag()?;
        serve::serve(args.port, &args.runs, &page, &stop)?;
    } else {
        tell_notes(&runs);
        write_page(args, &runs)?;
        if let Some(seconds) = args.refresh {
            write_again(args, Duration::from_secs(seconds))?;
        }
    }
    Ok(Outcome::Success)
}

/// Says once what could not be read.
fn tell_notes(runs: &[Run]) {
    for run in runs {
        run.notes.iter().for_each(|text| note(format_args!("{}: {text}", run.name)));
    }
}

fn write_page(args: &ReportArgs, runs: &[Run]) -> Result<()> {
    let page = dashboard(runs, &args.title, args.refresh).to_html();
    replace(&args.out, &page).with_context(|| format!("cannot write `{}`", args.out.display()))?;
    let plural = if runs.len() == 1 { "" } else { "s" };
    let megabytes = page.len() as f64 / 1e6;
    let out = args.out.display();
    say(format_args!("{out}: {} run{plural}, {megabytes:.2} MB", runs.len()));
    Ok(())
}

/// Writes the page again and again until Ctrl-C. A run that cannot be read for a moment leaves the
/// former page.
fn write_again(args: &ReportArgs, interval: Duration) -> Result<()> {
    let stop = stop_flag()?;
    say("Ctrl-C ends");
    loop {
        let begun = Instant::now();
        while begun.elapsed() < interval {
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        match read_runs(&args.runs) {
            Ok(runs) => write_page(args, &runs)?,
            Err(error) => note(format_args!("the page stays as it is: {error}")),
        }
    }
}

/// A flag that Ctrl-C or a termination request sets.
fn stop_flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let raised = Arc::clone(&stop);
    ctrlc::set_handler(move || raised.store(true, Ordering::Relaxed))
        .context("cannot listen for Ctrl-C")?;
    Ok(stop)
}

/// Writes a file aside and renames it: a browser sees the former page or the new one.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(folder)?;
    let mut builder = tempfile::Builder::new();
    builder.prefix(".deepwell-");
    // A temporary file is private to its user; the page gets the usual permissions.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let mut aside = builder.tempfile_in(folder)?;
    aside.write_all(text.as_bytes())?;
    let _: File = aside.persist(path).map_err(|error| error.error)?;
    Ok(())
}
