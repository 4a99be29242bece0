//! Measured rates of the links between the GPUs of this machine: peer copies, and an all-reduce
//! over all GPUs.

use deepwell_probe::Hardware;
use serde::{Deserialize, Serialize};

/// A copy from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRate {
    /// Index of the source GPU.
    pub from: usize,
    /// Index of the destination GPU.
    pub to: usize,
    /// 10⁹ bytes per second in this direction, without any other copy in flight.
    pub gbps: f64,
    /// Bandwidth of the link in one direction, as probed.
    pub link_gbps: Option<f64>,
    /// Whether the GPUs have peer access; otherwise the copy went through host memory.
    pub is_direct: bool,
}

/// An all-reduce over all GPUs by NCCL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AllReduceRate {
    /// GPUs.
    pub devices: usize,
    /// Bytes that each GPU contributes and receives.
    pub bytes: usize,
    /// Seconds.
    pub time_s: f64,
    /// Bus bandwidth, 10⁹ bytes per second: `2 (n - 1) / n` of the bytes, sent by each GPU.
    pub bus_gbps: f64,
    /// Version of NCCL.
    pub version: String,
}

/// Measured rates of the links.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasurements {
    /// Copies between each ordered pair of GPUs.
    pub copies: Vec<PeerRate>,
    /// The sum.
    pub all_reduce: Option<AllReduceRate>,
    /// Failed measurements, with their reasons.
    pub failures: Vec<String>,
}

/// Measures the links between the GPUs; empty for fewer than two GPUs. Allocates 512 MiB on each
/// GPU.
pub fn measure_links(hardware: &Hardware) -> LinkMeasurements {
    let mut measured = LinkMeasurements::default();
    if hardware.gpus.len() > 1 {
        measure_group(hardware, &mut measured);
    }
    measured
}

#[cfg(feature = "cuda")]
fn measure_group(hardware: &Hardware, measured: &mut LinkMeasurements) {
    use deepwell_kernels::cuda::DeviceGroup;
    use deepwell_probe::Endpoint;

    /// Size of a buffer: far larger than any cache, and large enough to hide the latency of a copy.
    const BYTES: usize = 256 << 20;

    let indices: Vec<usize> = (0..hardware.gpus.len()).collect();
    let mut group = match DeviceGroup::open(&indices, BYTES) {
        Ok(group) => group,
        Err(error) => return measured.failures.push(format!("links: {error}")),
    };
    for &from in &indices {
        for &to in indices.iter().filter(|&&to| to != from) {
            let ends = [from, to].map(|index| Endpoint::Gpu(hardware.gpus[index].index));
            let link = hardware.link_between(ends[0], ends[1]);
            match group.copy(from, to) {
                Ok(copy) => measured.copies.push(PeerRate {
                    from,
                    to,
                    gbps: copy.bytes_per_s / 1e9,
                    link_gbps: link.and_then(|link| link.gbps),
                    is_direct: copy.is_direct,
                }),
                Err(error) => measured.failures.push(format!("gpu{from} to gpu{to}: {error}")),
            }
        }
    }
    match group.all_reduce() {
        Ok(sum) => {
            measured.all_reduce = Some(AllReduceRate {
                devices: sum.devices,
                bytes: sum.bytes,
                time_s: sum.time_s,
                bus_gbps: sum.bus_bytes_per_s() / 1e9,
                version: sum.version,
            });
        }
        Err(error) => measured.failures.push(format!("all-reduce: {error}")),
    }
}

#[cfg(not(feature = "cuda"))]
fn measure_group(_: &Hardware, measured: &mut LinkMeasurements) {
    measured.failures.push("links: this build has no CUDA".to_string());
}
