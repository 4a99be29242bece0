//! `deepwell-emulate cycles`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use deepwell_emulator::cycles::timeline::timeline;
use deepwell_emulator::cycles::{Cycles, Estimate, Waiting};
use deepwell_emulator::decode::Program;
use deepwell_emulator::launch::Settings;
use deepwell_emulator::launch_file::PreparedLaunch;
use serde_json::{Value, json};

use crate::output::{print, print_json};
use crate::run::{LaunchArgs, launches};
use crate::text;

/// Waits that the text lists, with the slow bounds.
const WAITS: usize = 6;

/// Predict the time of launches on a GPU with the cycle model
#[derive(Debug, Args)]
pub(crate) struct CyclesArgs {
    #[command(flatten)]
    launches: LaunchArgs,
    /// Number of SMs [default: from the launch file, else 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    sm_count: Option<u32>,
    /// Write a timeline of each launch, with the slow bounds, to `FOLDER/KERNEL.json`, which
    /// ui.perfetto.dev shows; a clock is a microsecond there
    #[arg(long, value_name = "FOLDER")]
    timeline: Option<PathBuf>,
    /// Print one JSON document instead of text
    #[arg(long)]
    json: bool,
}

/// Runs every launch, records it and replays it on the model. Returns whether all launches are
/// right.
pub(crate) fn run(args: &CyclesArgs) -> Result<bool> {
    let mut all_right = true;
    let mut documents = Vec::new();
    for launch in launches(&args.launches)? {
        let settings = launch.settings(Settings { tracker: false, ..Settings::default() });
        let sm_count = args.sm_count.unwrap_or(settings.sm_count);
        let settings = Settings { sm_count, ..settings };
        let (outcome, recording) = launch.run_recorded(&settings);
        if !outcome.is_right() {
            all_right = false;
            print(&text::outcome(&launch, &settings, &outcome))?;
            continue;
        }
        let program = launch.program().context("the launch ran without a program")?;
        let Some(estimate) = Estimate::of(&recording, program) else {
            bail!("no cycle model for `{}`: expected sm_90a, sm_100a or sm_103a", program.target);
        };
        if let Some(folder) = &args.timeline {
            write_timeline(folder, &estimate.slow, program)?;
        }
        match args.json {
            true => documents.push(json_of(&launch, &estimate)),
            false => print(&text_of(&launch, program, &estimate))?,
        }
    }
    if args.json {
        print_json(&json!({ "right": all_right, "launches": documents }))?;
    }
    Ok(all_right)
}

fn write_timeline(folder: &Path, cycles: &Cycles, program: &Program) -> Result<()> {
    let path = folder.join(format!("{}.json", program.name));
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&path, timeline(cycles, program)))
        .with_context(|| format!("cannot write `{}`", path.display()))
}

fn text_of(launch: &PreparedLaunch, program: &Program, estimate: &Estimate) -> String {
    let mut text = format!("{} on {} SMs of {}\n", program.name, estimate.slow.sms, program.target);
    let [low, high] = estimate.clocks();
    let [least, most] = estimate.mma_fraction().map(|of| 100.0 * of);
    let _ = writeln!(text, "  clocks        {low:.0} to {high:.0}");
    let _ = writeln!(text, "  of MMA peak   {least:.1} to {most:.1} %");
    for (name, cycles) in [("fast", &estimate.fast), ("slow", &estimate.slow)] {
        let mut units: Vec<_> = cycles.busy.iter().filter(|unit| *unit.1 >= 0.005).collect();
        units.sort_by(|a, b| b.1.total_cmp(a.1));
        let shares: Vec<String> = units
            .iter()
            .map(|(unit, share)| format!("{} {:.0} %", unit.name(), 100.0 * *share))
            .collect();
        let _ = writeln!(text, "  {name} bounds   {}", shares.join(", "));
        if cycles.stuck > 0 {
            let _ =
                writeln!(text, "  {} warps never ended: the recording is incomplete", cycles.stuck);
        }
    }
    // Warps of a group wait together: the longest stands for all four.
    let mut waits: BTreeMap<(u32, u32), Waiting> = BTreeMap::new();
    for ((warp, pc), waiting) in &estimate.slow.waits {
        let of = waits.entry((warp / 4, *pc)).or_default();
        if waiting.clocks > of.clocks {
            *of = *waiting;
        }
    }
    let mut waits: Vec<_> = waits.into_iter().collect();
    waits.sort_by(|a, b| b.1.clocks.total_cmp(&a.1.clocks));
    let total = f64::from(estimate.slow.sms) * estimate.slow.clocks;
    for ((group, pc), waiting) in waits.into_iter().take(WAITS) {
        let line = program.steps.get(pc as usize).map_or(0, |step| step.ptx_line);
        let chain: Vec<String> =
            launch.lines().chain(line).iter().skip(2).take(3).map(ToString::to_string).collect();
        let _ = writeln!(
            text,
            "  {:4.1} % waits of warps {} to {}, PTX line {line}, {}",
            100.0 * waiting.clocks / total,
            4 * group,
            4 * group + 3,
            chain.join(" in ")
        );
    }
    text
}

fn json_of(launch: &PreparedLaunch, estimate: &Estimate) -> Value {
    let bound = |cycles: &Cycles| {
        let busy: serde_json::Map<String, Value> = cycles
            .busy
            .iter()
            .map(|(unit, share)| (unit.name().to_owned(), json!(share)))
            .collect();
        json!({
            "clocks": cycles.clocks,
            "mma_fraction": cycles.mma_fraction(),
            "bound": cycles.bound().map(|(unit, _)| unit.name()),
            "busy": busy,
            "stuck": cycles.stuck,
        })
    };
    json!({
        "launch": launch.name(),
        "kernel": launch.file().kernel,
        "sms": estimate.slow.sms,
        "fast": bound(&estimate.fast),
        "slow": bound(&estimate.slow),
    })
}
