//! `deepwell probe`.

use std::fmt::Write;
use std::io::{self, IsTerminal};

use anyhow::Result;
use clap::Args;
use deepwell_probe::Hardware;
use serde::Serialize;

use crate::hardware::this_or;
use crate::measured::{Measured, measure};
use crate::output::{note, print, print_json, say};
use crate::{Outcome, cluster};

const AFTER_HELP: &str = "\
The machine is not changed. A missing driver or library is no error: it is listed with the reason
and what to install. Peaks are dense datasheet values; unknown peaks of a GPU without a known
datasheet are listed.

--measure measures memory copies, GEMMs in each format with a kernel, and launches; between GPUs,
copies between each pair and an all-reduce over all GPUs with NCCL. It takes a few seconds and at
most 512 MiB on a CPU, and more time and 4 GiB on each GPU. Run nothing else at the same time.

Examples:
  deepwell probe                         print a table
  deepwell probe --check                 check for faults that keep the GPUs from training
  deepwell probe --measure               also measure bandwidths and GEMMs
  deepwell probe --json > machine.json   for `--hardware machine.json` on another machine
  deepwell probe --hardware b200-x8      show a preset machine
  deepwell probe --cluster racks.toml    show several machines and their network

A cluster file:
  rails = 8
  [[nodes]]
  count = 16
  preset = \"h200-x8\"
  nics = 8
  nic_gbit_per_s = 400

Exit codes: 0 shown, 1 with --check: a fault keeps the GPUs from training, 2 a file or a name cannot
be used";

/// Show the hardware of this machine: CPU, GPUs, links, drivers and libraries
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ProbeArgs {
    /// Show another machine: output of `deepwell probe --json`, or a preset such as h200-x8
    #[arg(long, value_name = "FILE")]
    hardware: Option<String>,
    /// Show a cluster: a TOML file, or a preset such as hgx-h200-x16 or gb300-nvl72
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hardware", "measure", "check"])]
    cluster: Option<String>,
    /// Measure memory, GEMMs and launches of the CPU and of each GPU
    #[arg(long, conflicts_with = "hardware")]
    measure: bool,
    /// Exit with code 1 if a fault keeps the GPUs from training; print each fault with its fix
    #[arg(long)]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Output of `probe --json`: the hardware, readable by `--hardware`, and the measurements.
#[derive(Debug, Serialize)]
struct Probed {
    #[serde(flatten)]
    hardware: Hardware,
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Measured>,
}

pub(crate) fn run(args: &ProbeArgs) -> Result<Outcome> {
    if let Some(name) = &args.cluster {
        cluster::show(name, args.json)?;
        return Ok(Outcome::Success);
    }
    let mut hardware = this_or(args.hardware.as_deref())?;
    let measured = args.measure.then(|| measure(&hardware));
    if let Some(measured) = &measured {
        if measured.cpu.fits_in_cache {
            note("the buffers fit into the caches: this is their bandwidth more than the memory's");
        }
        hardware.cpu.memory_gbps = Some(measured.cpu.copy_gbps);
    }
    let refusals = hardware.refusals();
    if args.json {
        print_json(&Probed { hardware, measured })?;
    } else {
        // The table contains the warnings too; on a terminal once is enough.
        for warning in hardware.warnings().into_iter().filter(|_| !io::stdout().is_terminal()) {
            note(warning);
        }
        let mut text = hardware.table();
        if let Some(measured) = &measured {
            // Writing to a string does not fail.
            let _ = write!(text, "\n{measured}");
        }
        print(&text)?;
    }
    if !args.check || refusals.is_empty() {
        return Ok(Outcome::Success);
    }
    for fault in refusals {
        say(format_args!("refused: {}\nhint: {}", fault.reason, fault.fix));
    }
    Ok(Outcome::Failed)
}
