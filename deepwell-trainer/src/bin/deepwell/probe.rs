//! `deepwell probe`.

use anyhow::Result;
use clap::Args;
use deepwell_probe::{measure_memory_bandwidth, probe};

use crate::Outcome;
use crate::output::{note, print, print_json};

const AFTER_HELP: &str = "\
Nothing is changed on the machine, and what is missing is no error: it is listed with the reason
and what to install.

Examples:
  deepwell probe                         a table
  deepwell probe --measure               with the memory bandwidth of the processor, measured
  deepwell probe --json > machine.json   for `--hardware machine.json` on another machine";

/// Show what this machine is: processor, GPUs, links, drivers and libraries
#[derive(Args, Debug)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct ProbeArgs {
    /// Measure the memory bandwidth of the processor: under 0.1 s, at most 512 MiB
    #[arg(long)]
    measure: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ProbeArgs) -> Result<Outcome> {
    let mut hardware = probe();
    if args.measure {
        let measured = measure_memory_bandwidth(&hardware.cpu);
        if measured.fits_in_cache {
            note("the buffers fit into the caches: this is their bandwidth more than the memory's");
        }
        hardware.cpu.memory_gbps = Some(measured.gbps);
    }
    if args.json {
        print_json(&hardware)?;
    } else {
        for warning in hardware.warnings() {
            note(warning);
        }
        print(&hardware.table())?;
    }
    Ok(Outcome::Success)
}
