//! The op family `mx_gemm`.

pub(crate) mod cublaslt;
pub(crate) mod expand_scales;
pub(crate) mod mxfp8_gemm;
pub(crate) mod sm100_mxfp8_gemm;
pub(crate) mod sm100_mxfp8_gemm_fused;
pub(crate) mod sm120_mxfp8_gemm;
