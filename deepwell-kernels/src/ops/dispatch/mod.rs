//! Assigns each pair of token and expert to a row of a buffer that is sorted by expert.

pub mod cpu;
pub(crate) mod cuda;
mod cuda_to_ranks;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("dispatch", cpu::prepare),
        CpuKernel::new("dispatch_to_ranks", cpu::prepare_to_ranks),
    ],
    cuda: &[cuda::SPECS, cuda_to_ranks::SPECS],
};
