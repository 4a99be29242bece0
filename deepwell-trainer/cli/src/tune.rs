//! `deepwell tune`.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use deepwell_bench::Machine;
use deepwell_bench::tune::{
    GemmSize, OnDevice, TuneReport, TuneSettings, Tuned, Tuning, calls_of, tune,
};
use deepwell_kernels::cuda::tuned::{TunedTable, heuristics_behind};
use deepwell_precision::PRESETS;
use deepwell_probe::{Hardware, probe};
use deepwell_trainer::terminal::stderr_draws;
use deepwell_trainer::tuned::{TUNED_FOLDER, kernel_versions, read_table, table_text};
use deepwell_trainer::{Device, TrainError};
use indicatif::{ProgressBar, ProgressStyle};

use crate::Outcome;
use crate::output::{print, print_json, say};

const AFTER_HELP: &str = "\
Times every GEMM, grouped GEMM and attention call of a training step that several kernels or tiles
can serve. Operands are random data larger than the last-level cache. Timing is interleaved: each
round times every candidate once. The kernel with the smallest predicted time stays selected unless
another one is faster by half a percent in the median round, and faster in nine of ten rounds.

The result is a table in JSON. Kernel selection uses the tables in target/tuned of the working
directory or a parent, then the built-in tables. DEEPWELL_TUNED names another table to use in place
of target/tuned; `off` selects by predicted time alone. A row applies to the measured GPU model, to
shapes whose sizes are each within a factor of 1.25, while the sources of its kernels are unchanged.
`deepwell plan --explain` shows which calls are tuned. Another kernel may sum in another order, so a
run whose kernels a new table changes resumes only with `deepwell train --resume --accept-changes`.

The table is saved after each shape. A second call measures only shapes that the table lacks or that
were measured with other versions of the kernels.

Examples:
  deepwell tune                                   llama-1.1b at 8 x 2048, in BF16 and MXFP8
  deepwell tune --model llama-134m,gpt2 --batch-size 32 --seq-len 1024
  deepwell tune --shapes 16384x2048x5632,8192x4096x4096
  deepwell tune --again --json > tune.json        measure all shapes again

Exit codes: 0 the table is complete, 1 some kernels failed, 2 an input cannot be used";

/// Time all kernels of each shape on a GPU, and write the table for kernel selection
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct TuneArgs {
    /// Presets, config.json files or model folders, separated by commas [default: llama-1.1b, with
    /// --shapes none]
    #[arg(long, value_name = "MODELS", value_delimiter = ',')]
    model: Vec<String>,
    /// Additional linear layers, tokens x outputs x inputs; fprop, dgrad and wgrad of each are
    /// timed
    #[arg(long, value_name = "MxNxK", value_delimiter = ',')]
    shapes: Vec<GemmSize>,
    /// Precision to tune in addition to bf16; auto: mxfp8-128 on Hopper, mxfp8 elsewhere
    #[arg(long, value_name = "NAME", default_value = "auto",
          value_parser = PossibleValuesParser::new(
              std::iter::once("auto").chain(PRESETS.iter().copied())))]
    precision: String,
    /// Sequences per step
    #[arg(long, value_name = "SEQUENCES", default_value_t = 8)]
    batch_size: usize,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    seq_len: usize,
    /// Rounds; each times every kernel once, for 10 ms or one call
    #[arg(long, value_name = "COUNT", default_value_t = 20)]
    rounds: usize,
    /// GPU to measure: `cuda[:N]`
    #[arg(long, default_value_t = Device::Cuda(0))]
    device: Device,
    /// Also measure shapes that the table already has
    #[arg(long)]
    again: bool,
    /// Table file to read and write [default: target/tuned/, named by the GPU]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TuneArgs) -> Result<Outcome> {
    let hardware = probe();
    let settings = args.settings(&hardware)?;
    // Report all errors of the arguments before measuring.
    let target = args.device.target(&hardware)?;
    let calls = calls_of(&settings, &hardware, &target)?;
    let gpu = target.gpu_name.clone().context("a GPU has a name")?;
    let mut machine = Machine::describe(args.device, &hardware);
    let path = args
        .out
        .clone()
        .unwrap_or_else(|| Path::new(TUNED_FOLDER).join(machine.slug()).with_extension("json"));
    let mut table = match path.exists() {
        true => of_this_gpu(read_table(&path)?, &path, &target.arch, &gpu)?,
        false => TunedTable::new(&target.arch, &gpu, target.workers),
    };
    let versions = kernel_versions();
    let mut device = args.device.open(&hardware)?;
    let mut source = OnDevice::new(&mut device, &hardware, args.rounds);
    say(format_args!("tune: {} shapes on {gpu}, table {}", calls.len(), path.display()));
    let bar = stderr_draws().then(|| bar(calls.len()));
    let clocks_before = machine.clone();
    let mut save = |table: &TunedTable| write(&path, table).map_err(TrainError::io(&path));
    let mut progress = |done: usize, of: usize, tuned: &Tuned| match &bar {
        Some(bar) => {
            bar.suspend(|| say(line(tuned)));
            bar.set_position(done as u64);
        }
        None => say(format_args!("tune: {done} of {of}: {}", line(tuned))),
    };
    let mut tuning = Tuning {
        target: &target,
        driver: hardware.software.driver.version().map_or_else(unknown, |known| known.to_string()),
        versions: &versions,
        source: &mut source,
        again: args.again,
        save: &mut save,
        progress: &mut progress,
    };
    let shapes = tune(&calls, &mut table, &mut tuning)?;
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    machine.push_clocks(args.device, "after the last shape");
    if shapes.iter().any(|tuned| !tuned.known && tuned.taken.is_some()) {
        table.clocks.clone_from(&clocks_before.facts);
        let after = machine.facts.iter().skip(clocks_before.facts.len());
        table.clocks.extend(after.cloned());
        table.heuristics_behind = Some(heuristics_behind(&table));
        write(&path, &table).map_err(TrainError::io(&path))?;
    }
    let report = TuneReport {
        table: path.display().to_string(),
        gpu,
        machine,
        heuristics_behind: heuristics_behind(&table),
        shapes,
    };
    let failed = report.shapes.iter().filter(|tuned| !tuned.failures.is_empty()).count();
    if args.json {
        print_json(&report)?;
    } else {
        print(&text(&report))?;
    }
    say(format_args!("tune: {} shapes, {failed} with failures; {}", calls.len(), path.display()));
    Ok(if failed == 0 { Outcome::Success } else { Outcome::Failed })
}

fn unknown() -> String {
    "unknown".to_string()
}

impl TuneArgs {
    fn settings(&self, hardware: &Hardware) -> Result<TuneSettings> {
        if !matches!(self.device, Device::Cuda(_)) {
            bail!(
                "--device: expected a GPU, `cuda` or `cuda:N`, got `{}`\n\
                 hint: kernels of a processor have no rivals, and an emulated GPU has no speed",
                self.device
            );
        }
        for (flag, size) in [
            ("--batch-size", self.batch_size),
            ("--seq-len", self.seq_len),
            ("--rounds", self.rounds),
        ] {
            if size == 0 {
                bail!("{flag}: expected at least 1, got 0");
            }
        }
        let mut resolved = deepwell_trainer::Settings {
            device: self.device,
            precision: self.precision.clone(),
            ..deepwell_trainer::Settings::default()
        };
        self.device.target(hardware).map_err(without_other_device)?;
        resolved.resolve_precision(hardware)?;
        let mut precisions = vec!["bf16".to_string()];
        if resolved.precision != "bf16" {
            precisions.push(resolved.precision);
        }
        let models = match (self.model.as_slice(), self.shapes.as_slice()) {
            ([], []) => vec!["llama-1.1b".to_string()],
            (models, _) => models.to_vec(),
        };
        Ok(TuneSettings {
            device: self.device,
            models,
            precisions,
            batch_size: self.batch_size,
            seq_len: self.seq_len,
            shapes: self.shapes.clone(),
        })
    }
}

/// Removes the hint about `--device cpu` from an error: tuning needs a GPU.
fn without_other_device(error: TrainError) -> TrainError {
    match error {
        TrainError::Setting { setting, expected, got, hint: Some(hint) } => {
            let hint = hint.strip_suffix("; `--device cpu` needs none").unwrap_or(&hint);
            TrainError::Setting { setting, expected, got, hint: Some(hint.to_string()) }
        }
        other => other,
    }
}

fn of_this_gpu(table: TunedTable, path: &Path, arch: &str, gpu: &str) -> Result<TunedTable> {
    if table.architecture != arch || table.gpu != gpu {
        bail!(
            "{}: expected a table of {gpu}, got one of {}\nhint: `--out` names another file",
            path.display(),
            table.gpu
        );
    }
    Ok(table)
}

/// Writes to a temporary file, and renames it once it is complete.
fn write(path: &Path, table: &TunedTable) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let text = table_text(table);
    let mut file = tempfile::NamedTempFile::with_prefix_in(".tuned-", folder)?;
    file.write_all(text.as_bytes())?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

fn bar(shapes: usize) -> ProgressBar {
    let bar = ProgressBar::new(shapes as u64).with_prefix("tune");
    match ProgressStyle::with_template("{prefix:>8} {wide_bar} {pos} of {len} eta {eta}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

/// Formats a shape, its selected kernel, and the kernel's lead.
fn line(tuned: &Tuned) -> String {
    let mut text = tuned.shape.clone();
    match (&tuned.taken, tuned.time_s) {
        (Some(taken), Some(time_s)) => {
            text += &format!(": {taken} {:.1} us", time_s * 1e6);
        }
        _ => text += ": nothing could be timed",
    }
    if tuned.taken.as_ref() != Some(&tuned.heuristics) {
        let behind =
            tuned.behind.map_or_else(|| "not timed".to_string(), |by| format!("{by:.3} x"));
        text += &format!(", {} {behind}", tuned.heuristics);
    } else if let Some(next) = tuned.runner_up {
        text += &format!(", as predicted; the next {next:.3} x");
    }
    if tuned.known {
        text += " (known)";
    }
    for failure in &tuned.failures {
        text += &format!("\n  failed: {failure}");
    }
    text
}

fn text(report: &TuneReport) -> String {
    let mut text: String = report.shapes.iter().map(|tuned| line(tuned) + "\n").collect();
    let behind = &report.heuristics_behind;
    text += &format!(
        "\nselection by predicted time: {:.3} x the time of the table's over {} rows, at most \
         {:.3} x{}\n",
        behind.mean,
        behind.rows,
        behind.worst,
        match behind.worst_row.as_str() {
            "" => String::new(),
            row => format!(" ({row})"),
        }
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_another_gpu_stay_as_they_are() {
        let table = || TunedTable::new("hopper-sm90", "NVIDIA H200", 132);
        let check = |arch: &str, gpu: &str, expected: bool| {
            assert_eq!(of_this_gpu(table(), Path::new("t.json"), arch, gpu).is_ok(), expected);
        };
        check("hopper-sm90", "NVIDIA H200", true);
        check("hopper-sm90", "NVIDIA H100 80GB HBM3", false);
        check("blackwell-sm100", "NVIDIA H200", false);
    }

    #[test]
    fn lines_say_what_is_taken_and_by_how_much() {
        let tuned = Tuned {
            shape: "linear bf16 8,8,8".to_string(),
            taken: Some("ours 128x256".to_string()),
            time_s: Some(1.25e-5),
            heuristics: "library".to_string(),
            behind: Some(1.0712),
            runner_up: Some(1.02),
            known: false,
            failures: Vec::new(),
        };
        let check = |tuned: &Tuned, expected: &str| assert_eq!(line(tuned), expected);
        check(&tuned, "linear bf16 8,8,8: ours 128x256 12.5 us, library 1.071 x");
        let same = Tuned { heuristics: "ours 128x256".to_string(), known: true, ..tuned.clone() };
        check(
            &same,
            "linear bf16 8,8,8: ours 128x256 12.5 us, as predicted; the next 1.020 x (known)",
        );
        let failures = vec!["library: no memory".to_string()];
        let none = Tuned { taken: None, time_s: None, behind: None, failures, ..tuned };
        check(
            &none,
            "linear bf16 8,8,8: nothing could be timed, library not timed\n  \
             failed: library: no memory",
        );
    }

    #[test]
    fn tables_are_written_whole_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b/t.json");
        let table = TunedTable::new("hopper-sm90", "NVIDIA H200", 132);
        write(&path, &table).unwrap();
        write(&path, &table).unwrap();
        assert_eq!(read_table(&path).unwrap(), table);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
