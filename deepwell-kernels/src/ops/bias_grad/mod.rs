//! Gradient of a bias: the sum of rows.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[CpuKernel::new("bias_grad", cpu::prepare).scratch(cpu::workspace_bytes)],
    cuda: &[cuda::SPECS],
};
