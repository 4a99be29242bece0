//! Memory limit of plans: one rule for `plan`, `dryrun` and `train`.

use deepwell_ir::Target;
use deepwell_probe::Hardware;

use crate::gpu::gpu_of;

/// Divisor of the free memory, for the share unused by plans: 2 %.
///
/// Predictions hold within 0.3 % on one GPU and within 2 % on ranks connected by NCCL
/// (`benchmarks/train_h200_2026-11-27.md`, `benchmarks/ranks_h100_2026-11-27.md`). All other memory
/// of a run is part of the prediction: the arena, the reserve for GEMMs with BF16 fallback, the
/// CUDA context, constants, and NCCL's buffers
/// ([`KernelCatalog::fixed_overhead_bytes`](deepwell_ir::KernelCatalog::fixed_overhead_bytes)).
const MARGIN: u64 = 50;

/// Bytes usable by a plan, of `free_bytes` on a device.
///
/// ```
/// assert_eq!(deepwell_lower::usable_bytes(100 << 30), 98 << 30);
/// ```
pub const fn usable_bytes(free_bytes: u64) -> u64 {
    free_bytes - free_bytes.div_ceil(MARGIN)
}

/// Bytes usable on each of `ranks` devices like `target`. Ranks on a CPU, and emulated GPUs, share
/// the CPU's memory.
pub fn memory_limit_bytes(hardware: &Hardware, target: &Target, ranks: usize) -> u64 {
    match gpu_of(hardware, target) {
        Some(gpu) => usable_bytes(gpu.memory_free_bytes),
        None => usable_bytes(hardware.cpu.memory_available_bytes) / ranks.max(1) as u64,
    }
}
