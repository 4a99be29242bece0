//! Biases of experts, added to grouped rows, and their gradients.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("grouped_bias", cpu::prepare_forward),
        CpuKernel::new("grouped_bias_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS],
};
