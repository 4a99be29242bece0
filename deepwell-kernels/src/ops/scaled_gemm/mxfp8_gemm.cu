// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands: E4M3 data and one E8M0 scale
// per 32 elements along K. All three GEMMs of a linear layer have this form.
//
// Supports any architecture with mma.sync on E4M3, and any scales; see mma/mxfp8_factors.cuh. A CTA
// computes one 128 x 128 tile; see epilogue/mxfp8_gemm.cuh. `_scalar` kernels read single elements,
// for K that is not a multiple of 16.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "epilogue/mxfp8_gemm.cuh"
#include "mma/mxfp8_factors.cuh"

using mxfp8_tile::FactorSteps;

MXFP8_GEMM(mxfp8_gemm_bf16, FactorSteps, true, bf16)
MXFP8_GEMM(mxfp8_gemm_bf16_scalar, FactorSteps, false, bf16)
MXFP8_GEMM(mxfp8_gemm_f32, FactorSteps, true, float)
MXFP8_GEMM(mxfp8_gemm_f32_scalar, FactorSteps, false, float)
