//! The kernels: one file here for each `.cu` file, and one for each use of a library.

mod adamw;
mod add;
mod add_positions;
mod attention;
mod attention_backward;
mod bf16_gemm;
mod bias_grad;
mod cast;
mod cublaslt_linear;
mod cublaslt_mx_gemm;
mod dequantize;
mod elementwise_quantize;
mod embedding;
mod embedding_backward;
mod expand_scales;
pub(super) mod fused;
mod fused_product;
mod gelu;
mod gelu_quantize;
mod grad_norm;
mod head_rms_norm;
mod layer_norm;
mod layer_norm_backward;
mod layer_norm_quantize;
mod linear_cross_entropy;
mod mx;
mod mxfp8_gemm;
mod norm_quantize;
mod products;
mod quantize;
mod rms_norm;
mod rms_norm_backward;
mod rms_norm_quantize;
mod rope;
mod rows;
mod sm100_bf16_gemm;
mod sm100_bf16_gemm_fused;
mod sm100_mxfp8_gemm;
mod sm100_mxfp8_gemm_fused;
mod sm120_mxfp8_gemm;
mod stochastic_round;
mod support;
mod swiglu;
mod swiglu_quantize;
mod tcgen05;
mod tcgen05_cost;
mod tensor_list;

use super::spec::{CudaKernelSpec, SelectTile};

/// Every kernel, preferred ones first within an op.
pub fn cuda_kernels() -> impl Iterator<Item = &'static CudaKernelSpec> {
    [
        adamw::SPECS,
        add::SPECS,
        add_positions::SPECS,
        attention::SPECS,
        attention_backward::SPECS,
        cublaslt_linear::SPECS,
        sm100_bf16_gemm::SPECS,
        sm100_bf16_gemm_fused::SPECS,
        bf16_gemm::SPECS,
        bias_grad::SPECS,
        cast::SPECS,
        dequantize::SPECS,
        embedding::SPECS,
        embedding_backward::SPECS,
        gelu::SPECS,
        gelu_quantize::SPECS,
        grad_norm::SPECS,
        head_rms_norm::SPECS,
        layer_norm::SPECS,
        layer_norm_backward::SPECS,
        layer_norm_quantize::SPECS,
        linear_cross_entropy::SPECS,
        cublaslt_mx_gemm::SPECS,
        sm100_mxfp8_gemm::SPECS,
        sm100_mxfp8_gemm_fused::SPECS,
        sm120_mxfp8_gemm::SPECS,
        mxfp8_gemm::SPECS,
        quantize::SPECS,
        rms_norm::SPECS,
        rms_norm_backward::SPECS,
        rms_norm_quantize::SPECS,
        rope::SPECS,
        stochastic_round::SPECS,
        swiglu::SPECS,
        swiglu_quantize::SPECS,
    ]
    .into_iter()
    .flatten()
}

/// How a kernel's tile is selected, for those that have several.
pub fn tile_selection(kernel: &str) -> Option<SelectTile> {
    let tiled = [
        (sm100_bf16_gemm::SPECS, sm100_bf16_gemm::select_tile as SelectTile),
        (sm100_mxfp8_gemm::SPECS, sm100_mxfp8_gemm::select_tile),
        (sm100_bf16_gemm_fused::SPECS, sm100_bf16_gemm_fused::select_tile),
        (sm100_mxfp8_gemm_fused::SPECS, sm100_mxfp8_gemm_fused::select_tile),
    ];
    let is_of = |specs: &[CudaKernelSpec]| specs.iter().any(|spec| spec.name == kernel);
    tiled.into_iter().find(|(specs, _)| is_of(specs)).map(|(_, select)| select)
}
