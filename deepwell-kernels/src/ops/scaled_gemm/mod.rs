//! GEMM of block-quantized operands.

mod cpu;
mod cublaslt;
pub(crate) mod dequantize_nvfp4_operands;
pub(crate) mod dequantize_operands;
mod dequantized_gemm;
mod expand_scales;
mod mxfp8_gemm;
pub mod nvfp4;
pub mod nvfp4_oracle;
mod sm100_mxfp8_gemm;
mod sm100_mxfp8_gemm_fused;
mod sm100_nvfp4_gemm;
mod sm120_mxfp8_gemm;
pub(crate) mod sm120_nvfp4_gemm;
mod sm90_dequantized_nvfp4_gemm;
pub(crate) mod sm90_mxfp8_gemm;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

/// Positions of the inputs of a GEMM with block scales, grouped or not.
pub(super) mod operand {
    pub(crate) const A: usize = 0;
    pub(crate) const A_SCALES: usize = 1;
    pub(crate) const B: usize = 2;
    pub(crate) const B_SCALES: usize = 3;
    /// Of a GEMM that is not grouped, and only if the op has a bias.
    pub(crate) const BIAS: usize = 4;
}

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[CpuKernel::new("scaled_gemm", cpu::prepare).scratch(cpu::workspace_bytes).tiered()],
    cuda: &[
        cublaslt::SPECS,
        dequantized_gemm::SPECS,
        sm100_mxfp8_gemm::SPECS,
        sm100_mxfp8_gemm_fused::SPECS,
        sm100_nvfp4_gemm::SPECS,
        sm120_mxfp8_gemm::SPECS,
        sm120_nvfp4_gemm::SPECS,
        sm90_mxfp8_gemm::SPECS,
        mxfp8_gemm::SPECS,
        sm90_dequantized_nvfp4_gemm::SPECS,
    ],
};
