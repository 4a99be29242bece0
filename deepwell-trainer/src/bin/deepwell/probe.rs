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
Nothing is changed on the machine, and what is missing is no error: it is listed with the reason
and what to install. Peaks are dense ones of datasheets; of a GPU that nobody has a sheet of, those
that are not known are named.

--measure runs what the peaks promise: copies in memory, GEMMs in each format that there
is a kernel for, launches; between GPUs, copies from each to each and a sum over all of them by
NCCL. A few seconds on a processor with 512 MiB at most, some more and 4 GiB for each GPU; nothing
else should run meanwhile.

Examples:
  deepwell probe                         a table
  deepwell probe --check                 is there anything that training would be refused for
  deepwell probe --measure               and what the machine reaches
  deepwell probe --json > machine.json   for `--hardware machine.json` on another machine
  deepwell probe --hardware b200-x8      a machine that is not here
  deepwell probe --cluster racks.toml    several machines and their network

A cluster file:
  rails = 8
  [[nodes]]
  count = 16
  preset = \"h200-x8\"
  nics = 8
  nic_gbit_per_s = 400

Exit codes: 0 shown, 1 with --check: something must be put right before training on the GPUs,
2 a file or a name that cannot be used";

/// Show what this machine is: processor, GPUs, links, drivers and libraries
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ProbeArgs {
    /// Show another machine: the JSON of `deepwell probe --json`, or a preset such as h200-x8
    #[arg(long, value_name = "FILE")]
    hardware: Option<String>,
    /// Show a cluster: a TOML file, or a preset such as hgx-h200-x16 or gb300-nvl72
    #[arg(long, value_name = "FILE", conflicts_with_all = ["hardware", "measure", "check"])]
    cluster: Option<String>,
    /// Measure memory, GEMMs and launches, of the processor and of each GPU
    #[arg(long, conflicts_with = "hardware")]
    measure: bool,
    /// Fail where something keeps the GPUs from training: each with what to do about it
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
