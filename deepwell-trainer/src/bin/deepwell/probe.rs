//! `deepwell probe`.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use deepwell_plan::format_bytes;
use deepwell_probe::{Cluster, Hardware, NUMBER_FORMATS, NumberFormat};
use deepwell_trainer::bench::{
    CpuMeasurements, GpuMeasurements, LinkMeasurements, ProductRate, measure_cpu, measure_gpu,
    measure_links,
};
use serde::Serialize;

use crate::Outcome;
use crate::hardware::this_or;
use crate::output::{note, print, print_json, say};

const AFTER_HELP: &str = "\
Nothing is changed on the machine, and what is missing is no error: it is listed with the reason
and what to install. Peaks are dense ones of datasheets; of a GPU that nobody has a sheet of, those
that are not known are named.

--measure runs what the peaks promise: copies in memory, matrix products in each format that there
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
    /// Measure memory, matrix products and launches, of the processor and of each GPU
    #[arg(long, conflicts_with = "hardware")]
    measure: bool,
    /// Fail where something keeps the GPUs from training: each with what to do about it
    #[arg(long)]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `probe --json` prints: the hardware, as `--hardware` takes it, and what was measured.
#[derive(Debug, Serialize)]
struct Probed {
    #[serde(flatten)]
    hardware: Hardware,
    #[serde(skip_serializing_if = "Option::is_none")]
    measured: Option<Measured>,
}

/// What was measured.
#[derive(Debug, Serialize)]
struct Measured {
    cpu: CpuMeasurements,
    gpus: Vec<GpuMeasurements>,
    links: LinkMeasurements,
}

/// What `probe --cluster --json` prints.
#[derive(Debug, Serialize)]
struct ClusterSummary {
    name: String,
    nodes: u32,
    gpus: u32,
    gpu_memory_bytes: u64,
    rails: u32,
    /// Dense TFLOP/s of all GPUs together, of the formats that all of them have.
    peak_tflops: BTreeMap<NumberFormat, f64>,
    kinds: Vec<NodesSummary>,
}

/// Machines of one kind.
#[derive(Debug, Serialize)]
struct NodesSummary {
    count: u32,
    preset: String,
    gpus: u32,
    nics: u32,
    nic_gbit_per_s: f64,
    network_gbps_per_gpu: Option<f64>,
    nvlink_domain_gpus: Option<u32>,
}

impl ClusterSummary {
    fn new(cluster: &Cluster) -> ClusterSummary {
        let peak = |format| Some((format, cluster.peak_tflops(format).filter(|&peak| peak > 0.0)?));
        ClusterSummary {
            name: cluster.name.clone(),
            nodes: cluster.node_count(),
            gpus: cluster.gpu_count(),
            gpu_memory_bytes: cluster.gpu_memory_bytes(),
            rails: cluster.rails,
            peak_tflops: NUMBER_FORMATS.into_iter().filter_map(peak).collect(),
            kinds: cluster
                .nodes
                .iter()
                .map(|nodes| NodesSummary {
                    count: nodes.count,
                    preset: nodes.preset.clone(),
                    gpus: nodes.gpu_count(),
                    nics: nodes.nics,
                    nic_gbit_per_s: nodes.nic_gbit_per_s,
                    network_gbps_per_gpu: nodes.network_gbps_per_gpu(),
                    nvlink_domain_gpus: nodes.nvlink_domain_gpus(),
                })
                .collect(),
        }
    }
}

/// The cluster that a file or a name describes.
fn read_cluster(name: &str) -> Result<Cluster> {
    if !Path::new(name).exists() {
        return Cluster::preset(name)
            .with_context(|| format!("cluster: expected a TOML file or a preset, got `{name}`"));
    }
    let text = std::fs::read_to_string(name).with_context(|| format!("cannot read `{name}`"))?;
    Cluster::from_toml(&text).with_context(|| format!("cannot use `{name}` as a cluster"))
}

pub(crate) fn run(args: &ProbeArgs) -> Result<Outcome> {
    if let Some(name) = &args.cluster {
        let cluster = read_cluster(name)?;
        if args.json {
            print_json(&ClusterSummary::new(&cluster))?;
        } else {
            print(&cluster.table())?;
        }
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
        // The table names them too; on a terminal once is enough.
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

fn measure(hardware: &Hardware) -> Measured {
    say("measuring the processor");
    let cpu = measure_cpu(hardware);
    let gpus = (0..hardware.gpus.len())
        .map(|index| {
            say(format_args!("measuring gpu{index}"));
            measure_gpu(index, hardware).unwrap_or_else(|error| GpuMeasurements {
                index,
                failures: vec![error.to_string()],
                ..GpuMeasurements::default()
            })
        })
        .collect();
    if hardware.gpus.len() > 1 {
        say("measuring what joins the GPUs");
    }
    Measured { cpu, gpus, links: measure_links(hardware) }
}

/// A rate with as many digits as it is good for.
fn rate(number: f64) -> String {
    match number {
        _ if number >= 100.0 => format!("{number:.0}"),
        _ if number >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// ` of 4800 (88 %)`, where there is something to be read against.
fn of(number: f64, peak: Option<f64>) -> String {
    match peak {
        Some(peak) if peak > 0.0 => {
            format!(" of {} ({:.0} %)", rate(peak), 100.0 * number / peak)
        }
        _ => String::new(),
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "measured")?;
        let row = |f: &mut fmt::Formatter<'_>, label: &str, text: fmt::Arguments<'_>| {
            writeln!(f, "{label:<16} {text}")
        };
        let products = |f: &mut fmt::Formatter<'_>, products: &[ProductRate]| {
            products.iter().try_for_each(|product| {
                let [m, n, k] = product.shape;
                let (number, unit) = match product.tflops {
                    tflops if tflops < 1.0 => (1e3, "GFLOP/s"),
                    _ => (1.0, "TFLOP/s"),
                };
                let reached = product.tflops * number;
                let peak = of(reached, product.peak_tflops.map(|peak| peak * number));
                let text = format_args!(
                    "{} {unit}{peak}, {m} x {n} x {k} by {}",
                    rate(reached),
                    product.kernel
                );
                row(f, &format!("  {}", product.format), text)
            })
        };
        let failures = |f: &mut fmt::Formatter<'_>, failures: &[String]| {
            failures.iter().try_for_each(|failure| {
                // The first line says what; the others would be hints for training.
                let first = failure.lines().next().unwrap_or_default();
                row(f, "  not measured", format_args!("{first}"))
            })
        };
        let CpuMeasurements { copy_gbps, triad_gbps, .. } = self.cpu;
        let (copy, triad) = (rate(copy_gbps), rate(triad_gbps));
        row(f, "CPU", format_args!("copy {copy} GB/s, triad {triad} GB/s"))?;
        products(f, &self.cpu.products)?;
        failures(f, &self.cpu.failures)?;
        for gpu in &self.gpus {
            let copy = gpu.copy_gbps.map_or("no copy".to_string(), |gbps| {
                format!("copy {} GB/s{}", rate(gbps), of(gbps, gpu.memory_gbps))
            });
            row(f, &format!("GPU {}", gpu.index), format_args!("{copy}"))?;
            if let Some(times) = gpu.launches {
                let text = format_args!(
                    "{:.1} us there and back, one each {:.1} us in a stream, {:.1} us in a graph",
                    times.round_trip_us, times.in_stream_us, times.in_graph_us
                );
                row(f, "  launch", text)?;
            }
            products(f, &gpu.products)?;
            failures(f, &gpu.failures)?;
        }
        for copy in &self.links.copies {
            let way = if copy.is_direct { "" } else { ", through the host" };
            let peak = of(copy.gbps, copy.link_gbps);
            let label = format!("GPU {} to {}", copy.from, copy.to);
            row(f, &label, format_args!("copy {} GB/s{peak}{way}", rate(copy.gbps)))?;
        }
        if let Some(sum) = &self.links.all_reduce {
            let text = format_args!(
                "{} GB/s by each of {} GPUs, {:.2} ms for {}, NCCL {}",
                rate(sum.bus_gbps),
                sum.devices,
                sum.time_s * 1e3,
                format_bytes(sum.bytes as u64),
                sum.version
            );
            row(f, "all-reduce", text)?;
        }
        failures(f, &self.links.failures)
    }
}

#[cfg(test)]
mod tests {
    use deepwell_trainer::bench::{AllReduceRate, LaunchTimes, PeerRate};

    use super::*;

    #[test]
    fn measurements_as_a_table() {
        let product = |format, size, kernel: &str, tflops, peak_tflops| ProductRate {
            format,
            shape: [size; 3],
            kernel: kernel.to_string(),
            tflops,
            peak_tflops,
        };
        let measured = Measured {
            cpu: CpuMeasurements {
                copy_gbps: 21.34,
                triad_gbps: 9.876,
                fits_in_cache: false,
                products: vec![
                    product(NumberFormat::Fp32, 1024, "cpu_linear_f32", 0.1234, Some(0.2)),
                    product(NumberFormat::Bf16, 1024, "cpu_linear_amx", 1.5, None),
                ],
                failures: Vec::new(),
            },
            gpus: vec![
                GpuMeasurements {
                    copy_gbps: Some(4228.0),
                    memory_gbps: Some(4800.0),
                    launches: Some(LaunchTimes {
                        round_trip_us: 6.04,
                        in_stream_us: 2.16,
                        in_graph_us: 1.35,
                    }),
                    products: vec![product(NumberFormat::Bf16, 8192, "lt", 742.0, Some(989.0))],
                    failures: vec!["mxfp8: no kernel\n  more".to_string()],
                    ..GpuMeasurements::default()
                },
                GpuMeasurements { index: 1, failures: vec!["lost".into()], ..Default::default() },
            ],
            links: LinkMeasurements {
                copies: vec![
                    PeerRate {
                        from: 0,
                        to: 1,
                        gbps: 390.0,
                        link_gbps: Some(478.116),
                        is_direct: true,
                    },
                    PeerRate { from: 1, to: 0, gbps: 12.5, link_gbps: None, is_direct: false },
                ],
                all_reduce: Some(AllReduceRate {
                    devices: 2,
                    bytes: 256 << 20,
                    time_s: 8.1e-4,
                    bus_gbps: 331.4,
                    version: "2.27.3".to_string(),
                }),
                failures: Vec::new(),
            },
        };
        insta::assert_snapshot!(measured.to_string(), @r"
        measured
        CPU              copy 21.3 GB/s, triad 9.88 GB/s
          fp32           123 GFLOP/s of 200 (62 %), 1024 x 1024 x 1024 by cpu_linear_f32
          bf16           1.50 TFLOP/s, 1024 x 1024 x 1024 by cpu_linear_amx
        GPU 0            copy 4228 GB/s of 4800 (88 %)
          launch         6.0 us there and back, one each 2.2 us in a stream, 1.4 us in a graph
          bf16           742 TFLOP/s of 989 (75 %), 8192 x 8192 x 8192 by lt
          not measured   mxfp8: no kernel
        GPU 1            no copy
          not measured   lost
        GPU 0 to 1       copy 390 GB/s of 478 (82 %)
        GPU 1 to 0       copy 12.5 GB/s, through the host
        all-reduce       331 GB/s by each of 2 GPUs, 0.81 ms for 256.0 MiB, NCCL 2.27.3
        ");
    }
}
