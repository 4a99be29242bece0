//! Selection of table rows by token, and the gradient of the table.

pub mod cpu;
mod cuda;
mod cuda_backward;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("embedding", cpu::prepare_forward),
        CpuKernel::new("embedding_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS, cuda_backward::SPECS],
};
