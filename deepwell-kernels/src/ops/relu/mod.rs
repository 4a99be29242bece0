//! Rectified linear unit, and its backward.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("relu", cpu::prepare_forward),
        CpuKernel::new("relu_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS],
};
