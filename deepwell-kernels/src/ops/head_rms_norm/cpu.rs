//! Uses [`rms_norm`] with heads as rows.

use deepwell_ir::KernelRequest;

use crate::ops::rms_norm::cpu as rms_norm;
use crate::runtime::cpu::gemm::Tier;

/// Scratch of the sums over rows.
pub(super) fn backward_workspace_bytes(request: &KernelRequest<'_>, _: Tier, _: usize) -> usize {
    let (head_dim, rows) = (request.operands[2].shape[0], request.operands[3].shape[0]);
    rms_norm::rms_norm_backward_workspace_bytes(rows, head_dim)
}
