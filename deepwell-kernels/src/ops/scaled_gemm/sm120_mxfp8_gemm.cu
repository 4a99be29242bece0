// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands: E4M3 data and one E8M0 scale
// per 32 elements along K. All three GEMMs of a linear layer have this form.
//
// Supports tensor cores that apply the scales of blocks of 32, and any scales, without scaling
// after the MMAs; see mma/mxfp8_block_scale.cuh. A CTA computes one 128 x 128 tile; see
// epilogue/mxfp8_gemm.cuh. `_scalar` kernels read single elements, for K that is not a multiple of
// 16.
//
// architectures: sm_120a
#include "common/types.cuh"
#include "epilogue/mxfp8_gemm.cuh"
#include "mma/mxfp8_block_scale.cuh"

using mxfp8_tile::BlockScaleSteps;

MXFP8_GEMM(sm120_mxfp8_gemm_bf16, BlockScaleSteps, true, bf16)
MXFP8_GEMM(sm120_mxfp8_gemm_bf16_scalar, BlockScaleSteps, false, bf16)
MXFP8_GEMM(sm120_mxfp8_gemm_f32, BlockScaleSteps, true, float)
MXFP8_GEMM(sm120_mxfp8_gemm_f32_scalar, BlockScaleSteps, false, float)
