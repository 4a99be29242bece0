//! The three GEMMs of a linear layer.

mod bf16_gemm;
mod cpu;
mod cublaslt;
pub mod oracle;
mod sm100_bf16_gemm;
mod sm100_bf16_gemm_fused;
mod sm90_bf16_gemm;
pub(crate) mod sm90_bf16_tiles;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        CpuKernel::new("linear", cpu::prepare).scratch(cpu::workspace_bytes).tiered(),
        CpuKernel::new("linear_dgrad", cpu::prepare).scratch(cpu::workspace_bytes).tiered(),
        CpuKernel::new("linear_wgrad", cpu::prepare).scratch(cpu::workspace_bytes).tiered(),
    ],
    cuda: &[
        cublaslt::SPECS,
        sm100_bf16_gemm::SPECS,
        sm100_bf16_gemm_fused::SPECS,
        sm90_bf16_gemm::SPECS,
        bf16_gemm::SPECS,
    ],
};
