//! The auxiliary losses of a router, with their gradient.

pub mod cpu;
mod cuda;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("router_loss", cpu::prepare),
        CpuKernel::new("router_loss_grad", cpu::prepare),
    ],
    cuda: &[cuda::SPECS],
};
