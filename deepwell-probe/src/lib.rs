//! Describes the hardware of a machine: CPUs, GPUs, links and libraries, as one value.
//!
//! # Brief overview
//!
//! [`probe`] examines the machine and returns a [`Hardware`]. It never fails and never panics:
//! missing parts are recorded in the value, with the reason and a hint what to install. The value
//! is plain data that JSON preserves unchanged, so that a plan can be made on one machine for
//! another; [`Hardware::preset`] describes machines that are not at hand.
//!
//! A `Hardware` has a [`Cpu`] (model, cores, memory nodes, vector extensions, caches, memory, and
//! estimated peaks by [`NumberFormat`]), a [`Gpu`] for each device (architecture, memory, clocks,
//! power, and dense peaks from its datasheet), [`Link`]s between pairs, and [`Software`].
//! [`Hardware::fabric`] is the machine as a graph, in which GPUs joined by an NVSwitch are
//! connected to a switch vertex, even if the switch is hidden from a virtual machine.
//! [`Hardware::table`] is a human-readable table.
//!
//! ```
//! use deepwell_probe::{Hardware, NumberFormat, probe};
//!
//! let hardware = probe();
//! print!("{}", hardware.table());
//! assert!(hardware.cpu.peak_gflops(NumberFormat::Fp32) > 0.0);
//! assert_eq!(Hardware::from_json(&hardware.to_json())?, hardware);
//!
//! let b200 = Hardware::preset("b200-x8")?;
//! assert_eq!(b200.gpus[0].peak_tflops(NumberFormat::Mxfp8), Some(4500.0));
//! # Ok::<(), deepwell_probe::ProbeError>(())
//! ```
//!
//! # Sources
//!
//! The processor is read from `/proc` and `/sys` (on systems other than Linux: core count and
//! vector extensions only). GPUs are queried through NVIDIA's management library and, for cache
//! size and SMs, through the CUDA driver, which is started (`cuInit`) only if there is a GPU; no
//! context is created on any device. Libraries are loaded, asked for their version, and stay
//! loaded. No call changes a setting.
//!
//! Bandwidths are computed from hardware properties, except for the processor's memory, which
//! [`measure_memory_bandwidth`] and [`measure_triad`] measure on request. GEMMs and GPUs are
//! measured by `deepwell probe --measure`, which has the kernels.

mod arch;
mod assemble;
mod cluster;
mod cluster_name;
mod cluster_table;
mod cpu;
mod cpu_read;
mod datasheet;
mod dynamic;
mod error;
mod files;
mod format;
mod gpu;
mod hardware;
mod link;
mod memory;
mod nvml;
mod preset;
mod record;
mod refusal;
mod skus;
mod software;
mod table;

pub use arch::Arch;
pub use cluster::{Cluster, Nodes};
pub use cpu::{
    ASSUMED_FREQUENCY_HZ, ASSUMED_MEMORY_GBPS_PER_CORE, Cache, CacheKind, Cpu, NumaNode, SIMD_NAMES,
};
pub use error::ProbeError;
pub use format::{NUMBER_FORMATS, NumberFormat};
pub use gpu::{Clocks, Gpu, NvLinkDomain, Pcie};
pub use hardware::{Absence, Hardware};
pub use link::{Endpoint, Fabric, FabricEdge, Link, LinkKind, PcieMeet};
pub use memory::{MemoryBandwidth, measure_memory_bandwidth, measure_triad};
pub use refusal::Fault;
pub use software::{Library, Software};

use files::{FileTree, HostFiles};
use record::{GpuSource, NoAnswers};
use software::DRIVER;

/// Describes this machine.
///
/// Never fails: missing parts are recorded in the value, with the reason and a hint. Takes a few
/// milliseconds without a GPU; with GPUs, the start-up time of the driver.
pub fn probe() -> Hardware {
    let usable_threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    let cpu = cpu_read::read_cpu(&HostFiles, usable_threads as u32);
    let found = dynamic::libraries();
    let libraries = Software {
        driver: Library::missing(&DRIVER, &[]),
        cuda_driver_api: found.cuda_driver_api,
        cuda_runtime: found.cuda_runtime,
        nccl: found.nccl,
        cublaslt: found.cublaslt,
        nvrtc: found.nvrtc,
    };
    describe(cpu, &HostFiles, &nvml::ManagementLibrary, libraries)
}

/// Bytes of GPU `ordinal` currently used by all processes and the driver together; `None` without
/// such a GPU or driver. GPUs are numbered as in CUDA, under `CUDA_VISIBLE_DEVICES`. Takes some ten
/// microseconds: meant for sampling while a program runs.
pub fn gpu_memory_used_bytes(ordinal: usize) -> Option<u64> {
    nvml::memory_used_bytes(ordinal)
}

/// Combines the parts; the driver's own entry in `software` comes from `source`.
fn describe(
    cpu: Cpu,
    files: &dyn FileTree,
    source: &dyn GpuSource,
    mut software: Software,
) -> Hardware {
    match source.record() {
        Err(NoAnswers { absence, library_loaded }) => {
            let looked_for = if cfg!(windows) { "nvml.dll" } else { "libnvidia-ml.so.1" };
            software.driver = match library_loaded {
                true => Library::unusable(&DRIVER, absence.reason.clone(), None),
                false => Library::missing(&DRIVER, &[looked_for]),
            };
            Hardware { gpus_absent: Some(absence), software, ..Hardware::cpu_only(cpu) }
        }
        Ok(record) => {
            software.driver = match &record.driver_version {
                Ok(version) => Library::judged(&DRIVER, version, None, None),
                Err(refusal) => Library::unusable(&DRIVER, refusal.to_string(), None),
            };
            let (gpus, links) = assemble::assemble(&record, &cpu, files);
            let gpus_absent = gpus.is_empty().then(|| Absence {
                reason: "the NVIDIA driver runs and shows no device".to_owned(),
                hint: "check that a GPU is passed through to this machine or container".to_owned(),
            });
            Hardware { cpu, gpus, gpus_absent, links, software }
        }
    }
}

#[cfg(test)]
mod recordings;
#[cfg(test)]
mod tests;
