//! What several launchers share; each launcher is in the folder of its op.

pub(crate) mod elementwise_quantize;
pub(crate) mod fused;
pub(crate) mod fused_product;
pub(crate) mod mx;
pub(crate) mod norm_quantize;
pub(crate) mod products;
pub(crate) mod rows;
pub(crate) mod support;
pub(crate) mod tcgen05;
pub(crate) mod tcgen05_cost;
pub(crate) mod tensor_list;

use super::spec::{CudaKernelSpec, SelectTile};
use crate::ops;

/// Every kernel, preferred ones first within an op.
pub fn cuda_kernels() -> impl Iterator<Item = &'static CudaKernelSpec> {
    [
        ops::adamw::cuda::SPECS,
        ops::add::cuda::SPECS,
        ops::add_positions::cuda::SPECS,
        ops::attention::cuda::SPECS,
        ops::attention::cuda_backward::SPECS,
        ops::linear::cublaslt::SPECS,
        ops::linear::sm100_bf16_gemm::SPECS,
        ops::linear::sm100_bf16_gemm_fused::SPECS,
        ops::linear::bf16_gemm::SPECS,
        ops::bias_grad::cuda::SPECS,
        ops::cast::cuda::SPECS,
        ops::dequantize::cuda::SPECS,
        ops::embedding::cuda::SPECS,
        ops::embedding::cuda_backward::SPECS,
        ops::gelu::cuda::SPECS,
        ops::gelu::cuda_quantize::SPECS,
        ops::grad_norm::cuda::SPECS,
        ops::head_rms_norm::cuda::SPECS,
        ops::layer_norm::cuda::SPECS,
        ops::layer_norm::cuda_backward::SPECS,
        ops::layer_norm::cuda_quantize::SPECS,
        ops::linear_cross_entropy::cuda::SPECS,
        ops::mx_gemm::cublaslt::SPECS,
        ops::mx_gemm::sm100_mxfp8_gemm::SPECS,
        ops::mx_gemm::sm100_mxfp8_gemm_fused::SPECS,
        ops::mx_gemm::sm120_mxfp8_gemm::SPECS,
        ops::mx_gemm::mxfp8_gemm::SPECS,
        ops::quantize::cuda::SPECS,
        ops::rms_norm::cuda::SPECS,
        ops::rms_norm::cuda_backward::SPECS,
        ops::rms_norm::cuda_quantize::SPECS,
        ops::rope::cuda::SPECS,
        ops::stochastic_round::cuda::SPECS,
        ops::swiglu::cuda::SPECS,
        ops::swiglu::cuda_quantize::SPECS,
    ]
    .into_iter()
    .flatten()
}

/// How a kernel's tile is selected, for those that have several.
pub fn tile_selection(kernel: &str) -> Option<SelectTile> {
    let tiled = [
        (
            ops::linear::sm100_bf16_gemm::SPECS,
            ops::linear::sm100_bf16_gemm::select_tile as SelectTile,
        ),
        (ops::mx_gemm::sm100_mxfp8_gemm::SPECS, ops::mx_gemm::sm100_mxfp8_gemm::select_tile),
        (
            ops::linear::sm100_bf16_gemm_fused::SPECS,
            ops::linear::sm100_bf16_gemm_fused::select_tile,
        ),
        (
            ops::mx_gemm::sm100_mxfp8_gemm_fused::SPECS,
            ops::mx_gemm::sm100_mxfp8_gemm_fused::select_tile,
        ),
    ];
    let is_of = |specs: &[CudaKernelSpec]| specs.iter().any(|spec| spec.name == kernel);
    tiled.into_iter().find(|(specs, _)| is_of(specs)).map(|(_, select)| select)
}
