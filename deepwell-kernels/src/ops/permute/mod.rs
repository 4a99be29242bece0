//! Rows of tokens to rows of pairs, and sums of these per token.

pub mod cpu;
mod cuda;
mod cuda_quantize;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("permute", cpu::prepare_permute),
        CpuKernel::new("unpermute", cpu::prepare_unpermute),
        CpuKernel::new("add_unpermute", cpu::prepare_add_unpermute),
    ],
    cuda: &[cuda::SPECS, cuda_quantize::SPECS],
};
