//! What hardware is here: CPUs, GPUs, links and libraries, as one value.

mod arch;
mod assemble;
mod cpu;
mod cpu_read;
mod error;
mod files;
mod format;
mod gpu;
mod hardware;
mod link;
mod memory;
mod software;

pub use arch::Arch;
pub use cpu::{
    ASSUMED_FREQUENCY_HZ, ASSUMED_MEMORY_GBPS_PER_CORE, Cache, CacheKind, Cpu, NumaNode, SIMD_NAMES,
};
pub use error::ProbeError;
pub use format::{NUMBER_FORMATS, NumberFormat};
pub use gpu::{Clocks, Gpu, NvLinkDomain, Pcie};
pub use hardware::{Absence, Hardware};
pub use link::{Endpoint, Fabric, FabricEdge, Link, LinkKind, PcieMeet};
pub use memory::{MemoryBandwidth, measure_memory_bandwidth};
pub use software::{Library, Software};

/// Describes this machine.
pub fn probe() -> Hardware {
    let usable_threads = std::thread::available_parallelism().map_or(1, |count| count.get());
    Hardware::cpu_only(cpu_read::read_cpu(&files::HostFiles, usable_threads as u32))
}
