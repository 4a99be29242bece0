//! The op family `linear`.

pub(crate) mod bf16_gemm;
pub(crate) mod cublaslt;
pub mod oracle;
pub(crate) mod sm100_bf16_gemm;
pub(crate) mod sm100_bf16_gemm_fused;
