//! Selection biases for load balancing: counts of chosen experts, and the update.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("count_experts", cpu::prepare_counts),
        CpuKernel::new("selection_bias_update", cpu::prepare_update),
    ],
    cuda: &[cuda::SPECS],
};
