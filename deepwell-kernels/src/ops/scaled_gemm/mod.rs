//! GEMM of block-quantized operands.

mod cpu;
mod cublaslt;
pub(crate) mod dequantize_operands;
mod dequantized_gemm;
mod expand_scales;
mod mxfp8_gemm;
pub mod nvfp4;
pub mod nvfp4_oracle;
mod sm100_mxfp8_gemm;
mod sm100_mxfp8_gemm_fused;
mod sm120_mxfp8_gemm;
pub(crate) mod sm90_mxfp8_gemm;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[CpuKernel::new("scaled_gemm", cpu::prepare).scratch(cpu::workspace_bytes).tiered()],
    cuda: &[
        cublaslt::SPECS,
        dequantized_gemm::SPECS,
        sm100_mxfp8_gemm::SPECS,
        sm100_mxfp8_gemm_fused::SPECS,
        sm120_mxfp8_gemm::SPECS,
        sm90_mxfp8_gemm::SPECS,
        mxfp8_gemm::SPECS,
    ],
};
