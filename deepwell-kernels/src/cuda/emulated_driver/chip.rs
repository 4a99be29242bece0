//! Limits of the chips of an architecture, from NVIDIA's table of compute capabilities.

use crate::runtime::cuda::architecture::Architecture;

/// Limits of a chip.
pub(super) struct Chip {
    pub(super) capability: (u32, u32),
    /// The number in the name of the PTX target.
    pub(super) target: u32,
    pub(super) threads_per_sm: u32,
    pub(super) shared_bytes_per_sm: u32,
    pub(super) shared_bytes_per_cta: u32,
    pub(super) l2_bytes: u64,
}

impl Chip {
    pub(super) fn of(architecture: Architecture) -> Chip {
        let (capability, l2_bytes) = match architecture {
            Architecture::Sm90a => ((9, 0), 60 << 20),
            Architecture::Sm100a => ((10, 0), 126 << 20),
            Architecture::Sm103a => ((10, 3), 126 << 20),
            Architecture::Sm120a => ((12, 0), 96 << 20),
        };
        let is_consumer = architecture == Architecture::Sm120a;
        let (threads, shared_kib) = if is_consumer { (1536, 100) } else { (2048, 228) };
        Chip {
            capability,
            target: capability.0 * 10 + capability.1,
            threads_per_sm: threads,
            shared_bytes_per_sm: shared_kib << 10,
            // 1 KiB per CTA is reserved for the system.
            shared_bytes_per_cta: (shared_kib - 1) << 10,
            l2_bytes,
        }
    }
}
