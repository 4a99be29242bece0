//! `deepwell bench`: the arguments, a process for each group of sections, and the files of the
//! report. The library does the measurements.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::PossibleValuesParser;
use deepwell_bench::{
    LoadSampler, Machine, MixtureSize, Report, Row, RowEvent, Section, Settings, measure_copy,
    peers, run_sections,
};
use deepwell_precision::PRESETS;
use deepwell_probe::{Hardware, probe};
use deepwell_trainer::Device;
use deepwell_trainer::clock::utc_now;

use crate::Outcome;
use crate::output::{print, print_json, say};

const AFTER_HELP: &str = "\
Sections (default: all):
  gemm         GEMMs in BF16 and MXFP8
  experts      grouped GEMMs of MoE layers, balanced and skewed, in BF16 and MXFP8
  moe          forward and backward of an MoE layer, and of a dense layer with equal FLOPs
  quantize     block quantization along rows, columns and both
  attention    attention forward and backward, head sizes 64 and 128
  norms        norms and activations, alone and fused with quantization
  optimizer    AdamW and the gradient norm over the model's parameters
  transformer  one training step, op by op
  forward      the forward pass with its loss, as one graph on a GPU
  train        training steps: tokens/s, and the host's share of a step
  memory       predicted and measured peak memory

Columns: `roofline` is the larger of FLOPs over peak and bytes over memcpy bandwidth, which is
measured first. `of roofline` is roofline time over measured time, at most 100 %. A peer's value is
its time over ours: above 1x the peer is slower.

Kernels run on random data, with operands larger than the last-level cache, and on a GPU as graphs;
the time is a median. Shapes are those of --model, in BF16 and in --precision; the first five
sections except `moe` add a few well-known sizes. Section `moe` uses the layers of --mixture.

The table goes to stdout, progress to stderr, and bench.json, bench.txt and bench.html to --out.
Each part runs in its own process, so a crash loses only the rows of this part.

Examples:
  deepwell bench                                all sections, on the GPU if there is one
  deepwell bench gemm quantize --peers          compare with PyTorch, if python3 has it
  deepwell bench moe --mixture 64x1408x2048x6 --mixture-tokens 16384 --peers
  deepwell bench train --model llama-134m --batch-size 32 --seq-len 1024 --peers
  deepwell bench gemm --kernels sm90,cublaslt   compare kernels, each with all its tiles
  deepwell bench --device cpu --iterations 3    measure the CPU
  deepwell bench --peers --record               also write the report to benchmarks/

Exit codes: 0 every row was measured, 1 some failed, 2 an input cannot be used";

/// Time kernels and training; compare with roofline and PyTorch
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct BenchArgs {
    /// Sections to measure [default: all]
    #[arg(value_name = "SECTION", hide_possible_values = true)]
    sections: Vec<Section>,
    /// `cpu` or `cuda[:N]` [default: cuda if there is a GPU, else cpu]
    #[arg(long)]
    device: Option<Device>,
    /// Preset, config.json or model folder [default: llama-1.1b; on a CPU llama-micro]
    #[arg(long)]
    model: Option<String>,
    /// Precision to measure in addition to bf16; auto: mxfp8-128 on Hopper, mxfp8 elsewhere
    #[arg(long, value_name = "NAME", default_value = "auto",
          value_parser = PossibleValuesParser::new(
              std::iter::once("auto").chain(PRESETS.iter().copied())))]
    precision: String,
    /// Sequences per step [default: 8; on a CPU 2]
    #[arg(long, value_name = "SEQUENCES")]
    batch_size: Option<usize>,
    /// Tokens per sequence [default: 2048; on a CPU 64]
    #[arg(long, value_name = "TOKENS")]
    seq_len: Option<usize>,
    /// Samples per kernel, and steps per model [default: 20; on a CPU 5]
    #[arg(long, value_name = "COUNT")]
    iterations: Option<usize>,
    /// MoE layers of section `moe`: experts x expert width x hidden size x top-k, several separated
    /// by commas [default: 64x1408x2048x6,128x768x2048x8,8x14336x4096x2; on a CPU 8x64x128x2]
    #[arg(long, value_name = "SIZES", value_delimiter = ',')]
    mixture: Vec<MixtureSize>,
    /// Tokens per MoE layer [default: 16384; on a CPU 512]
    #[arg(long, value_name = "TOKENS")]
    mixture_tokens: Option<usize>,
    /// Also measure PyTorch on the same shapes, eager and compiled, if python3 has it
    #[arg(long)]
    peers: bool,
    /// Time all kernels whose names contain one of these strings, each with all its tiles, in place
    /// of the selected kernel
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    kernels: Vec<String>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Folder for bench.json, bench.txt and bench.html
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    out: PathBuf,
    /// Also write the report to benchmarks/ as Markdown, JSON and HTML, named by contents, device
    /// and date
    #[arg(long)]
    record: bool,
    /// Print only rows as they are measured, one JSON object per line
    #[arg(long, hide = true)]
    rows: bool,
    /// Do not measure BF16 in addition to the precision
    #[arg(long, hide = true)]
    alone: bool,
    /// Memcpy bandwidth of an earlier measurement, in GB/s
    #[arg(long, hide = true)]
    copy_gbps: Option<f64>,
}

/// Folder of the records.
const RECORDS: &str = "benchmarks";

pub(crate) fn run(args: &BenchArgs) -> Result<Outcome> {
    let hardware = probe();
    let mut settings = args.settings(&hardware)?;
    if args.rows {
        let mut write = |event: RowEvent| {
            let line = serde_json::to_string(&event).expect("a row is plain data");
            // A write fails if the parent has exited; its report is lost too.
            let _ = print(&format_args!("{line}\n"));
        };
        if args.sections.is_empty() {
            write(RowEvent::Copy(measure_copy(settings.device, &hardware)?));
        }
        run_sections(&settings, &hardware, &args.sections, &mut write)?;
        return Ok(Outcome::Success);
    }
    let sections = match args.sections.as_slice() {
        [] => Section::ALL.to_vec(),
        named => Section::ALL.into_iter().filter(|section| named.contains(section)).collect(),
    };
    let began = utc_now();
    let mut machine = Machine::describe(settings.device, &hardware);
    say(format_args!("bench: {} on {}", settings.device, machine.name));
    let mut rows: Vec<Row> = Vec::new();
    let mut copied = None;
    let copying = run_part(&settings, &[], &mut |event| {
        if let RowEvent::Copy(gbps) = event {
            copied = Some(gbps);
        }
    });
    if let Some(gbps) = copied {
        say(format_args!("bench: a copy moves {gbps:.0} GB/s, read and written"));
        machine.push("copy, read and written", format_args!("{gbps:.0} GB/s"));
    }
    if let Err(error) = copying {
        machine.push("copy", "failed: rooflines are made with the datasheet's bandwidth");
        rows.push(Row::failed(sections[0], "copy", format!("{error:#}")));
    }
    settings.copy_gbps = copied;
    for part in parts(&sections) {
        let names: Vec<&str> = part.iter().map(|section| section.name()).collect();
        let load = LoadSampler::start(settings.device);
        for settings in processes(&settings, &part) {
            let before = rows.len();
            let ran = run_part(&settings, &part, &mut |event| match event {
                RowEvent::Row(row) => rows.push(*row),
                RowEvent::Note(text) => say(format_args!("bench: {text}")),
                RowEvent::Copy(_) => {}
            });
            let Err(error) = ran else { continue };
            for &section in &part {
                let is_there = rows[before..].iter().any(|row| row.section == section);
                let what = if is_there { "the rest of the section" } else { "the section" };
                let dtype = settings.precision.clone();
                rows.push(Row { dtype, ..Row::failed(section, what, format!("{error:#}")) });
            }
        }
        if let Some(seen) = load.and_then(LoadSampler::finish) {
            machine.push(&format!("during {}", names.join(", ")), seen);
        }
    }
    machine.push_clocks(settings.device, "after the last section");
    let mut report = Report { began, settings, machine, rows };
    report.write(&args.out)?;
    if args.peers {
        let (device, samples) = (report.settings.device, report.settings.iterations);
        let mut progress = |text: &str| say(format_args!("bench: peers: {text}"));
        let load = LoadSampler::start(device);
        let software = peers::measure(&mut report.rows, device, samples, &mut progress);
        if !software.is_empty() {
            report.machine.push("peers", software);
        }
        if let Some(seen) = load.and_then(LoadSampler::finish) {
            report.machine.push("during peers", seen);
        }
        report.write(&args.out)?;
    }
    if args.record {
        let path = report.write_record(Path::new(RECORDS))?;
        say(format_args!("bench: record {}", path.display()));
    }
    if args.json {
        print_json(&report)?;
    } else {
        print(&report.to_text())?;
    }
    say(format_args!(
        "bench: {} rows, {} failed; {}",
        report.rows.len(),
        report.failures(),
        args.out.join("bench.html").display()
    ));
    Ok(if report.failures() == 0 { Outcome::Success } else { Outcome::Failed })
}

impl BenchArgs {
    fn settings(&self, hardware: &Hardware) -> Result<Settings> {
        let default_device = if hardware.gpus.is_empty() { Device::Cpu } else { Device::Cuda(0) };
        let device = self.device.unwrap_or(default_device);
        let is_cpu = device == Device::Cpu;
        let (model, batch, seq, iterations) =
            if is_cpu { ("llama-micro", 2, 64, 5) } else { ("llama-1.1b", 8, 2048, 20) };
        let mut resolved = deepwell_trainer::Settings {
            device,
            precision: self.precision.clone(),
            ..deepwell_trainer::Settings::default()
        };
        resolved.resolve_precision(hardware)?;
        let settings = Settings {
            device,
            model: self.model.clone().unwrap_or_else(|| model.to_string()),
            precision: resolved.precision,
            beside_bf16: !self.alone,
            batch_size: self.batch_size.unwrap_or(batch),
            seq_len: self.seq_len.unwrap_or(seq),
            iterations: self.iterations.unwrap_or(iterations),
            copy_gbps: self.copy_gbps,
            kernels: self.kernels.clone(),
            mixtures: match self.mixture.as_slice() {
                [] => MixtureSize::defaults(!is_cpu),
                sizes => sizes.to_vec(),
            },
            mixture_tokens: self.mixture_tokens.unwrap_or(if is_cpu { 512 } else { 16384 }),
        };
        for (flag, size) in [
            ("--batch-size", settings.batch_size),
            ("--seq-len", settings.seq_len),
            ("--iterations", settings.iterations),
            ("--mixture-tokens", settings.mixture_tokens),
        ] {
            if size == 0 {
                bail!("{flag}: expected at least 1, got 0");
            }
        }
        // Reject unusable settings before measuring.
        settings.graph()?;
        Ok(settings)
    }
}

/// Groups of sections that share a process: the sections of a model share its compilation.
fn parts(sections: &[Section]) -> Vec<Vec<Section>> {
    let (models, kernels): (Vec<Section>, Vec<Section>) =
        sections.iter().partition(|section| section.is_of_model());
    let mut parts: Vec<Vec<Section>> = kernels.into_iter().map(|section| vec![section]).collect();
    parts.extend((!models.is_empty()).then_some(models));
    parts
}

/// Settings of each process of a group. A model's peak memory is measured on a device that the
/// process has not used before, so a model has a process for each precision.
fn processes(settings: &Settings, part: &[Section]) -> Vec<Settings> {
    if !part.iter().any(|section| section.is_of_model()) {
        return vec![settings.clone()];
    }
    let alone = |precision: &str| Settings {
        precision: precision.to_string(),
        beside_bf16: false,
        ..settings.clone()
    };
    settings.precisions().into_iter().map(alone).collect()
}

/// Runs sections in a child process, so that a crash loses only their rows and the device's memory
/// is freed; with no sections, the child measures the memcpy bandwidth.
fn run_part(
    settings: &Settings,
    sections: &[Section],
    on_event: &mut dyn FnMut(RowEvent),
) -> Result<()> {
    let program = std::env::current_exe().context("this program does not know where it is")?;
    let mut command = Command::new(program);
    command.arg("bench").args(sections.iter().map(|section| section.name()));
    command.args(["--rows", "--device", &settings.device.to_string()]);
    command.args(["--model", &settings.model, "--precision", &settings.precision]);
    command.args(["--batch-size", &settings.batch_size.to_string()]);
    command.args(["--seq-len", &settings.seq_len.to_string()]);
    command.args(["--iterations", &settings.iterations.to_string()]);
    if !settings.beside_bf16 {
        command.arg("--alone");
    }
    if !settings.kernels.is_empty() {
        command.args(["--kernels", &settings.kernels.join(",")]);
    }
    let mixtures: Vec<String> = settings.mixtures.iter().map(MixtureSize::to_string).collect();
    command.args(["--mixture", &mixtures.join(",")]);
    command.args(["--mixture-tokens", &settings.mixture_tokens.to_string()]);
    if let Some(gbps) = settings.copy_gbps {
        command.args(["--copy-gbps", &gbps.to_string()]);
    }
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start")?;
    let output = child.stdout.take().context("no pipe")?;
    for line in BufReader::new(output).lines() {
        // Other lines are printed by libraries.
        if let Ok(event) = serde_json::from_str(&line.context("cannot read rows")?) {
            if let RowEvent::Row(row) = &event
                && let Some(failure) = &row.failure
            {
                say(format_args!("bench: failed: {} {}: {failure}", row.what, row.shape));
            }
            on_event(event);
        }
    }
    let status = child.wait().context("cannot wait for it")?;
    if !status.success() {
        bail!("its process ended with {status}; what it said is on stderr");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_share_a_process() {
        use Section::{Gemm, Memory, Norms, Train};
        assert_eq!(parts(&[Gemm, Norms]), [vec![Gemm], vec![Norms]]);
        assert_eq!(parts(&[Gemm, Train, Memory]), [vec![Gemm], vec![Train, Memory]]);
    }
}
