//! The projection of a router in FP32, and its backward.

pub mod cpu;
mod cublaslt;
mod cuda;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("router_logits", cpu::prepare_forward).scratch(cpu::workspace_bytes),
        CpuKernel::new("router_logits_backward", cpu::prepare_backward)
            .scratch(cpu::workspace_bytes),
    ],
    cuda: &[cublaslt::SPECS, cuda::SPECS],
};
