//! `silu(gate) · up`, and its backward.

pub mod cpu;
mod cuda;
mod cuda_quantize;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("swiglu", cpu::prepare_forward),
        CpuKernel::new("swiglu_backward", cpu::prepare_backward),
    ],
    cuda: &[cuda::SPECS, cuda_quantize::SPECS],
};
