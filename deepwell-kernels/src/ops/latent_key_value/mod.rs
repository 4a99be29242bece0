//! Keys and values of latent attention.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("latent_key_value", cpu::prepare_forward),
        CpuKernel::new("latent_key_value_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS],
};
