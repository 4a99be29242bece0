//! Kernels on a GPU against the f64 oracles, and each on the emulator (`emulated.rs`). Without a
//! GPU each test of the first kind is reported as ignored, with the reason; with
//! `DEEPWELL_REQUIRE_GPU` set that is a failure. So it is with PTX and `DEEPWELL_REQUIRE_PTX` for
//! those of the second.

// Some checks are for tests of the second kind alone.
#![cfg_attr(not(feature = "emulated"), allow(dead_code))]

use std::process::ExitCode;

#[macro_use]
mod trials;

mod adamw;
mod add;
mod add_positions;
mod attention;
mod attention_backward;
mod bf16_gemm;
mod bias_grad;
mod blas;
mod calibration;
mod cast;
mod compare;
mod cublaslt;
mod dequantize;
mod device;
mod driver;
mod elementwise_quantize;
mod embedding;
mod embedding_backward;
#[cfg(feature = "emulated")]
mod emulated;
mod expand_scales;
mod fused_product;
mod gelu;
mod grad_norm;
mod harness;
mod head_rms_norm;
mod layer_norm;
mod layer_norm_backward;
mod linear_cross_entropy;
mod mx;
mod mxfp8_gemm;
mod norm_quantize;
mod products;
#[cfg(feature = "emulated")]
mod ptx;
mod quantize;
mod rms_norm;
mod rms_norm_backward;
mod rope;
mod sm100_bf16_gemm;
mod sm100_mxfp8_gemm;
mod sm120_mxfp8_gemm;
mod stochastic_round;
mod swiglu;
mod tcgen05;

fn main() -> ExitCode {
    let code = trials::run();
    trials::note(compare::summary);
    code
}
