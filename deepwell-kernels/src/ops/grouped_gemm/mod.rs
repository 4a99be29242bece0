//! The three GEMMs of a layer for each group of rows, on plain and on quantized operands.
//! [`deepwell_ir::ops::GroupedGemm`]'s module documents the layout of rows, offsets and planes.

mod bf16_grouped_gemm;
pub mod cpu;
mod mxfp8_grouped_gemm;
pub mod oracle;
mod sm100_mxfp8_grouped_gemm;
mod sm100_nvfp4_grouped_gemm;
mod sm120_nvfp4_grouped_gemm;
mod sm90_bf16_grouped_gemm;
mod sm90_dequantized_grouped_gemm;
mod sm90_dequantized_nvfp4_grouped_gemm;
mod sm90_mxfp8_grouped_gemm;

use super::OpKernels;
use crate::runtime::cpu::CpuKernel;

const fn tiered(op: &'static str) -> CpuKernel {
    CpuKernel::new(op, cpu::prepare).scratch(cpu::workspace_bytes).tiered()
}

pub(super) const KERNELS: OpKernels = OpKernels {
    cpu: &[
        tiered("grouped_gemm"),
        tiered("grouped_gemm_dgrad"),
        tiered("grouped_gemm_wgrad"),
        tiered("scaled_grouped_gemm"),
    ],
    cuda: &[
        bf16_grouped_gemm::SPECS,
        mxfp8_grouped_gemm::SPECS,
        sm100_mxfp8_grouped_gemm::SPECS,
        sm100_nvfp4_grouped_gemm::SPECS,
        sm120_nvfp4_grouped_gemm::SPECS,
        sm90_mxfp8_grouped_gemm::SPECS,
        sm90_bf16_grouped_gemm::SPECS,
        sm90_dequantized_grouped_gemm::SPECS,
        sm90_dequantized_nvfp4_grouped_gemm::SPECS,
    ],
};
