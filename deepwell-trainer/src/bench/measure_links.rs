//! What the links between the GPUs of this machine reach: copies from one to another, and a sum
//! over all of them.

use deepwell_probe::Hardware;
use serde::{Deserialize, Serialize};

/// A copy from one GPU to another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerRate {
    /// Index of the GPU that is copied from.
    pub from: usize,
    /// Index of the GPU that is copied to.
    pub to: usize,
    /// 10⁹ bytes a second in this direction, nothing else being copied.
    pub gbps: f64,
    /// Bandwidth of the link in one direction, as the probe knows it.
    pub link_gbps: Option<f64>,
    /// Whether they reach each other's memory; else the copy went through the host's.
    pub is_direct: bool,
}

/// A sum over all GPUs that all of them get, by NCCL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AllReduceRate {
    /// GPUs.
    pub devices: usize,
    /// Bytes that each of them gives and gets.
    pub bytes: usize,
    /// Seconds.
    pub time_s: f64,
    /// 10⁹ bytes a second that each sends at least, `2 (n - 1) / n` of what is summed.
    pub bus_gbps: f64,
    /// Version of NCCL.
    pub version: String,
}

/// What the links reach.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasurements {
    /// Each GPU to each other.
    pub copies: Vec<PeerRate>,
    /// The sum.
    pub all_reduce: Option<AllReduceRate>,
    /// What could not be measured, and why.
    pub failures: Vec<String>,
}

/// Measures the links between the GPUs; nothing where there are fewer than two. Takes 512 MiB of
/// each.
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

    /// Of one buffer: far more than any cache, and enough for the start of a copy not to count.
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
