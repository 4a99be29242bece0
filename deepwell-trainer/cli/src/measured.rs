//! Measurements of `deepwell probe --measure`, and their table.

use std::fmt;

use deepwell_bench::{
    CpuMeasurements, GemmRate, GpuMeasurements, LinkMeasurements, measure_cpu, measure_gpu,
    measure_links,
};
use deepwell_plan::format_bytes;
use deepwell_probe::Hardware;
use serde::Serialize;

use crate::output::say;

/// The measurements.
#[derive(Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) cpu: CpuMeasurements,
    gpus: Vec<GpuMeasurements>,
    links: LinkMeasurements,
}

/// Measures this machine, with progress on stderr.
pub(crate) fn measure(hardware: &Hardware) -> Measured {
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

/// Formats a rate with its significant digits.
fn rate(number: f64) -> String {
    match number {
        _ if number >= 100.0 => format!("{number:.0}"),
        _ if number >= 10.0 => format!("{number:.1}"),
        _ => format!("{number:.2}"),
    }
}

/// Formats ` of 4800 (88 %)` if a peak is known.
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
        let gemms = |f: &mut fmt::Formatter<'_>, gemms: &[GemmRate]| {
            gemms.iter().try_for_each(|gemm| {
                let [m, n, k] = gemm.shape;
                let (number, unit) = match gemm.tflops {
                    tflops if tflops < 1.0 => (1e3, "GFLOP/s"),
                    _ => (1.0, "TFLOP/s"),
                };
                let reached = gemm.tflops * number;
                let peak = of(reached, gemm.peak_tflops.map(|peak| peak * number));
                let text = format_args!(
                    "{} {unit}{peak}, {m} x {n} x {k} by {}",
                    rate(reached),
                    gemm.kernel
                );
                row(f, &format!("  {}", gemm.format), text)
            })
        };
        let failures = |f: &mut fmt::Formatter<'_>, failures: &[String]| {
            failures.iter().try_for_each(|failure| {
                // The first line is the reason; the others would be hints for training.
                let first = failure.lines().next().unwrap_or_default();
                row(f, "  not measured", format_args!("{first}"))
            })
        };
        let CpuMeasurements { copy_gbps, triad_gbps, .. } = self.cpu;
        let (copy, triad) = (rate(copy_gbps), rate(triad_gbps));
        row(f, "CPU", format_args!("copy {copy} GB/s, triad {triad} GB/s"))?;
        gemms(f, &self.cpu.gemms)?;
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
            gemms(f, &gpu.gemms)?;
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
    use deepwell_bench::{AllReduceRate, LaunchTimes, PeerRate};
    use deepwell_probe::NumberFormat;

    use super::*;

    #[test]
    fn measurements_as_a_table() {
        let gemm = |format, size, kernel: &str, tflops, peak_tflops| GemmRate {
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
                gemms: vec![
                    gemm(NumberFormat::Fp32, 1024, "cpu_linear_f32", 0.1234, Some(0.2)),
                    gemm(NumberFormat::Bf16, 1024, "cpu_linear_amx", 1.5, None),
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
                    gemms: vec![gemm(NumberFormat::Bf16, 8192, "lt", 742.0, Some(989.0))],
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
