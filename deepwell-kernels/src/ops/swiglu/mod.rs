//! `silu(gate) · up`, and its backward; both also of gate and up in MXFP8.

pub mod cpu;
mod cuda;
mod cuda_quantize;
mod cuda_stored;
mod cuda_stored_quantize;
pub mod oracle;
pub mod stored;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("swiglu", cpu::prepare_forward),
        CpuKernel::new("swiglu_backward", cpu::prepare_backward),
        CpuKernel::new("stored_swiglu", stored::prepare_forward),
        CpuKernel::new("stored_swiglu_backward", stored::prepare_backward),
    ],
    cuda: &[cuda::SPECS, cuda_quantize::SPECS, cuda_stored::SPECS, cuda_stored_quantize::SPECS],
};
