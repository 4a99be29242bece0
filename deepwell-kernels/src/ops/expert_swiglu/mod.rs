//! The gated activation of experts times the router's gates, and its backward.

pub mod cpu;
mod cuda;
mod cuda_quantize;
pub mod oracle;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("expert_swiglu", cpu::prepare_forward),
        CpuKernel::new("expert_swiglu_backward", cpu::prepare_backward)
            .scratch(cpu::workspace_bytes),
    ],
    cuda: &[cuda::SPECS, cuda_quantize::SPECS],
};
