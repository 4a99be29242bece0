//! What the kernels' host sides share.

use deepwell_ir::{DType, KernelRequest};

/// CTAs of `threads` threads for `items` items, a thread taking several when there are more
/// than 16 CTAs for each SM; at least one.
pub(crate) fn grid_of(items: usize, threads: u32, sm_count: u32) -> u32 {
    let wanted = items.div_ceil(threads as usize).max(1);
    wanted.min(16 * sm_count as usize) as u32
}

/// Says which of `operands` is not BF16.
pub(crate) fn all_bf16(request: &KernelRequest<'_>, operands: &[usize]) -> Option<String> {
    let wrong = operands.iter().find(|&&index| request.operands[index].dtype != DType::Bf16)?;
    Some(format!("takes bf16 operands, not {}", request.operands[*wrong].dtype))
}
