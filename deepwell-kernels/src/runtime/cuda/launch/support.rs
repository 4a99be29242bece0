//! Helpers shared by all launchers.

use deepwell_ir::{DType, KernelRequest};

/// Number of CTAs of `threads` threads for `items` items, at least 1. Above 16 CTAs per SM, threads
/// process several items.
pub(crate) fn grid_of(items: usize, threads: u32, sm_count: u32) -> u32 {
    let wanted = items.div_ceil(threads as usize).max(1);
    wanted.min(16 * sm_count as usize) as u32
}

/// Why `operands` are rejected: the first operand that is not BF16.
pub(crate) fn all_bf16(request: &KernelRequest<'_>, operands: &[usize]) -> Option<String> {
    let wrong = operands.iter().find(|&&index| request.operands[index].dtype != DType::Bf16)?;
    Some(format!("takes bf16 operands, not {}", request.operands[*wrong].dtype))
}
