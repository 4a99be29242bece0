//! Kernels on a GPU against the f64 oracles, and each on the emulator (`emulated.rs`). Without a
//! GPU each test of the first kind is reported as ignored, with the reason; with
//! `DEEPWELL_REQUIRE_GPU` set that is a failure. So it is with PTX and `DEEPWELL_REQUIRE_PTX` for
//! those of the second.

// Some checks are for tests of the second kind alone.
#![cfg_attr(not(feature = "emulated"), allow(dead_code))]

use std::process::ExitCode;

#[macro_use]
extern crate deepwell_trials;

/// Makes a row of `emulated.rs`: `emulated! { add on Sm100a: |gpu| check(gpu, 401, 1000) }` runs
/// the kernels of `add.cu` on that architecture, unless another is asked for.
macro_rules! emulated {
    ($file:ident on $architecture:ident: $check:expr) => {
        #[cfg(feature = "emulated")]
        const _: () = {
            fn $file() {
                let architecture = deepwell_kernels::cuda::Architecture::$architecture;
                $crate::emulated::run(stringify!($file), architecture, $check);
            }
            ::deepwell_trials::inventory::submit! {
                ::deepwell_trials::Test::new("cuda::emulated", stringify!($file), $file)
            }
            ::deepwell_trials::inventory::submit! { $crate::emulated::Row(stringify!($file)) }
        };
    };
}

#[path = "../../src/ops/adamw/tests/cuda.rs"]
mod adamw;
#[path = "../../src/ops/adamw/tests/cuda_bf16.rs"]
mod adamw_bf16;
#[path = "../../src/ops/adamw/tests/cuda_fp8.rs"]
mod adamw_fp8;
#[path = "../../src/ops/adamw/tests/cuda_quantize.rs"]
mod adamw_quantize;
#[path = "../../src/ops/add/tests/cuda.rs"]
mod add;
#[path = "../../src/ops/add_positions/tests/cuda.rs"]
mod add_positions;
#[path = "../../src/ops/amax/tests/cuda.rs"]
mod amax;
#[path = "../../src/ops/amax/tests/cuda_groups.rs"]
mod amax_groups;
#[path = "../../src/ops/attention/tests/cuda.rs"]
mod attention;
#[path = "../../src/ops/attention/tests/cuda_backward.rs"]
mod attention_backward;
#[path = "../../src/ops/attention/tests/cuda_part.rs"]
mod attention_part;
#[path = "../../src/ops/linear/tests/bf16_gemm.rs"]
mod bf16_gemm;
#[path = "../../src/ops/grouped_gemm/tests/bf16_grouped_gemm.rs"]
mod bf16_grouped_gemm;
#[path = "../../src/ops/bias_grad/tests/cuda.rs"]
mod bias_grad;
mod blas;
mod calibration;
mod captures;
#[path = "../../src/ops/cast/tests/cuda.rs"]
mod cast;
mod compare;
mod cublaslt;
#[path = "../../src/ops/dequantize/tests/cuda.rs"]
mod dequantize;
#[path = "../../src/ops/dequantize/tests/cuda_nvfp4.rs"]
mod dequantize_nvfp4;
#[path = "../../src/ops/scaled_gemm/tests/dequantized_gemm.rs"]
mod dequantized_gemm;
mod device;
#[path = "../../src/ops/dispatch/tests/cuda.rs"]
mod dispatch;
mod driver;
mod elementwise_quantize;
#[path = "../../src/ops/embedding/tests/cuda.rs"]
mod embedding;
#[path = "../../src/ops/embedding/tests/cuda_backward.rs"]
mod embedding_backward;
#[cfg(feature = "emulated")]
mod emulated;
#[path = "../../src/ops/scaled_gemm/tests/expand_scales.rs"]
mod expand_scales;
#[path = "../../src/ops/expert_swiglu/tests/cuda.rs"]
mod expert_swiglu;
mod far_rows;
mod fused_gemm;
mod fused_quantize;
#[path = "../../src/ops/gelu/tests/cuda.rs"]
mod gelu;
mod gemm_operands;
#[path = "../../src/ops/grad_norm/tests/cuda.rs"]
mod grad_norm;
#[path = "../../src/ops/grouped_bias/tests/cuda.rs"]
mod grouped_bias;
mod harness;
#[path = "../../src/ops/head_rms_norm/tests/cuda.rs"]
mod head_rms_norm;
#[path = "../../src/ops/join_parts/tests/cuda.rs"]
mod join_parts;
#[path = "../../src/ops/latent_key_value/tests/cuda.rs"]
mod latent_key_value;
#[path = "../../src/ops/layer_norm/tests/cuda.rs"]
mod layer_norm;
#[path = "../../src/ops/layer_norm/tests/cuda_backward.rs"]
mod layer_norm_backward;
#[path = "../../src/ops/linear_cross_entropy/tests/cuda.rs"]
mod linear_cross_entropy;
mod mixture;
mod mx;
#[path = "../../src/ops/scaled_gemm/tests/mxfp8_gemm.rs"]
mod mxfp8_gemm;
#[path = "../../src/ops/grouped_gemm/tests/mxfp8_grouped_gemm.rs"]
mod mxfp8_grouped_gemm;
mod nccl;
mod norm_quantize;
#[path = "../../src/ops/grouped_gemm/tests/nvfp4_grouped_gemm.rs"]
mod nvfp4_grouped_gemm;
#[path = "../../src/ops/permute/tests/cuda.rs"]
mod permute;
#[path = "../../src/ops/product_error/tests/cuda.rs"]
mod product_error;
#[cfg(feature = "emulated")]
mod proofs;
#[cfg(feature = "emulated")]
mod ptx;
#[path = "../../src/ops/quantize/tests/cuda.rs"]
mod quantize;
#[path = "../../src/ops/quantize/tests/cuda_nvfp4.rs"]
mod quantize_nvfp4;
#[path = "../../src/ops/quantize/tests/cuda_nvfp4_groups.rs"]
mod quantize_nvfp4_groups;
#[path = "../../src/ops/quantize/tests/cuda_nvfp4_operands.rs"]
mod quantize_nvfp4_operands;
#[path = "../../src/ops/relu/tests/cuda.rs"]
mod relu;
#[path = "../../src/ops/rms_norm/tests/cuda.rs"]
mod rms_norm;
#[path = "../../src/ops/rms_norm/tests/cuda_backward.rs"]
mod rms_norm_backward;
#[path = "../../src/ops/rope/tests/cuda.rs"]
mod rope;
#[path = "../../src/ops/rope/tests/cuda_partial.rs"]
mod rope_partial;
#[path = "../../src/ops/route/tests/cuda.rs"]
mod route;
#[path = "../../src/ops/router_logits/tests/cuda.rs"]
mod router_logits;
#[path = "../../src/ops/router_loss/tests/cuda.rs"]
mod router_loss;
#[path = "../../src/ops/selection_bias/tests/cuda.rs"]
mod selection_bias;
#[path = "../../src/ops/attention/tests/sm100_attention.rs"]
mod sm100_attention;
#[path = "../../src/ops/attention/tests/sm100_attention_backward.rs"]
mod sm100_attention_backward;
#[path = "../../src/ops/linear/tests/sm100_bf16_gemm.rs"]
mod sm100_bf16_gemm;
#[path = "../../src/ops/scaled_gemm/tests/sm100_mxfp8_gemm.rs"]
mod sm100_mxfp8_gemm;
#[path = "../../src/ops/grouped_gemm/tests/sm100_mxfp8_grouped_gemm.rs"]
mod sm100_mxfp8_grouped_gemm;
#[path = "../../src/ops/scaled_gemm/tests/sm100_nvfp4_gemm.rs"]
mod sm100_nvfp4_gemm;
#[path = "../../src/ops/grouped_gemm/tests/sm100_nvfp4_grouped_gemm.rs"]
mod sm100_nvfp4_grouped_gemm;
#[path = "../../src/ops/scaled_gemm/tests/sm120_mxfp8_gemm.rs"]
mod sm120_mxfp8_gemm;
#[path = "../../src/ops/scaled_gemm/tests/sm120_nvfp4_gemm.rs"]
mod sm120_nvfp4_gemm;
#[path = "../../src/ops/grouped_gemm/tests/sm120_nvfp4_grouped_gemm.rs"]
mod sm120_nvfp4_grouped_gemm;
#[path = "../../src/ops/attention/tests/sm90_attention.rs"]
mod sm90_attention;
#[path = "../../src/ops/attention/tests/sm90_attention_backward.rs"]
mod sm90_attention_backward;
#[path = "../../src/ops/attention/tests/sm90_attention_backward_ordered.rs"]
mod sm90_attention_backward_ordered;
#[path = "../../src/ops/attention/tests/sm90_attention_backward_stored.rs"]
mod sm90_attention_backward_stored;
#[path = "../../src/ops/attention/tests/sm90_attention_backward_wide.rs"]
mod sm90_attention_backward_wide;
#[path = "../../src/ops/attention/tests/sm90_attention_narrow_values.rs"]
mod sm90_attention_narrow_values;
#[path = "../../src/ops/attention/tests/sm90_attention_part.rs"]
mod sm90_attention_part;
#[path = "../../src/ops/linear/tests/sm90_bf16_gemm.rs"]
mod sm90_bf16_gemm;
#[path = "../../src/ops/grouped_gemm/tests/sm90_bf16_grouped_gemm.rs"]
mod sm90_bf16_grouped_gemm;
#[path = "../../src/ops/scaled_gemm/tests/sm90_dequantized_nvfp4_gemm.rs"]
mod sm90_dequantized_nvfp4_gemm;
#[path = "../../src/ops/scaled_gemm/tests/sm90_mxfp8_gemm.rs"]
mod sm90_mxfp8_gemm;
#[path = "../../src/ops/grouped_gemm/tests/sm90_mxfp8_grouped_gemm.rs"]
mod sm90_mxfp8_grouped_gemm;
#[path = "../../src/ops/split_columns/tests/cuda.rs"]
mod split_columns;
#[path = "../../src/ops/stochastic_round/tests/cuda.rs"]
mod stochastic_round;
#[path = "../../src/ops/stochastic_round/tests/cuda_nvfp4.rs"]
mod stochastic_round_nvfp4;
#[path = "../../src/ops/stochastic_round/tests/cuda_nvfp4_groups.rs"]
mod stochastic_round_nvfp4_groups;
#[path = "../../src/ops/swiglu/tests/cuda.rs"]
mod swiglu;
mod tcgen05;
#[path = "../../src/ops/vocab_parallel/tests/cuda.rs"]
mod vocab_parallel;

fn main() -> ExitCode {
    let code = deepwell_trials::run();
    deepwell_trials::note(compare::summary);
    code
}
