//! How much memory of a device a plan may use: one rule for `plan`, `dryrun` and `train`.

use deepwell_ir::Target;
use deepwell_probe::Hardware;

use crate::autoplan::gpu_of;

/// Part of the free memory that plans leave alone, one in so many bytes: 2 %.
///
/// A prediction holds within 0.3 % on one GPU and within 2 % on ranks that NCCL connects
/// (`benchmarks/train_h200_2026-11-27.md`, `benchmarks/ranks_h100_2026-11-27.md`). Everything else
/// that a run takes is a part of the prediction, by name: the arena, what is reserved for GEMMs
/// that fall back, the context of CUDA, constants, and the buffers of NCCL
/// ([`KernelCatalog::fixed_overhead_bytes`](deepwell_ir::KernelCatalog::fixed_overhead_bytes)).
const MARGIN: u64 = 50;

/// Bytes that a plan may use of `free_bytes` of a device.
///
/// ```
/// assert_eq!(deepwell_plan::usable_bytes(100 << 30), 98 << 30);
/// ```
pub const fn usable_bytes(free_bytes: u64) -> u64 {
    free_bytes - free_bytes.div_ceil(MARGIN)
}

/// Bytes that a plan may use on each of `ranks` devices like `target`. Ranks of a processor, or of
/// GPUs that it emulates, share its memory.
pub fn memory_limit_bytes(hardware: &Hardware, target: &Target, ranks: usize) -> u64 {
    match gpu_of(hardware, target) {
        Some(gpu) => usable_bytes(gpu.memory_free_bytes),
        None => usable_bytes(hardware.cpu.memory_available_bytes) / ranks.max(1) as u64,
    }
}
