//! The router of a mixture of experts and its backward.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("route", cpu::prepare_forward),
        CpuKernel::new("route_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS],
};
