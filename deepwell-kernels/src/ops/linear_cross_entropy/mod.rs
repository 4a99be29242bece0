//! Output head and cross-entropy, with or without gradients.

pub mod cpu;
pub(super) mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("linear_cross_entropy", cpu::prepare).scratch(cpu::workspace).tiered(),
        CpuKernel::new("linear_cross_entropy_grad", cpu::prepare).scratch(cpu::workspace).tiered(),
    ],
    cuda: &[cuda::SPECS],
};
