//! Kernels on a real GPU against the f64 oracles. Without a GPU each test says that it was
//! skipped; with `DEEPWELL_REQUIRE_GPU` set that is a failure.

mod adamw;
mod add;
mod attention;
mod attention_backward;
mod bf16_gemm;
mod bias_grad;
mod blas;
mod calibration;
mod cast;
mod cublaslt;
mod driver;
mod elementwise_quantize;
mod embedding;
mod embedding_backward;
mod expand_scales;
mod gelu;
mod grad_norm;
mod harness;
mod layer_norm;
mod layer_norm_backward;
mod linear_cross_entropy;
mod mx;
mod mxfp8_gemm;
mod norm_quantize;
mod products;
mod quantize;
mod rms_norm;
mod rms_norm_backward;
mod rope;
mod sm100_bf16_gemm;
mod sm100_mxfp8_gemm;
mod swiglu;
mod tcgen05;
