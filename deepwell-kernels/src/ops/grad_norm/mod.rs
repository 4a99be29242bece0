//! Global norm of all gradients, directly or from sums that ranks gather.

pub mod cpu;
mod cuda;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("grad_norm", cpu::prepare),
        CpuKernel::new("sums_of_squares", cpu::prepare_sums),
        CpuKernel::new("norm_of_sums", cpu::prepare_norm_of_sums),
    ],
    cuda: &[cuda::SPECS],
};
