// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of NVFP4 operands: E2M1 data, two elements to a
// byte, one UE4M3 scale per 16 elements along K, both by rows, and an FP32 scale for each tensor.
// All three GEMMs of a linear layer have this form.
//
// The sums of elements times block scales are multiplied by the product of both tensor scales and
// rounded; then bias or stored results are added. A CTA computes one 128 x 128 tile; tiles at the
// edges read zeros and store only elements inside. Sums run over K in ascending order. `_scalar`
// kernels read single bytes, for K that is not a multiple of 32.
//
// architectures: sm_120a
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/nvfp4_block_scale.cuh"
#include "scheduler/tile_order.cuh"

using namespace nvfp4_tile;

static_assert(kStagedBytes<float> <= NvFp4Steps::kStages * NvFp4Steps::kStageBytes,
              "the result goes through the stages");

// Computes the tile of a CTA; CTAs beyond the last tile exit.
template <bool kVector, typename Element>
__device__ __forceinline__ void gemm(const Fp4Operand& a, const Fp4Operand& b, float factor,
                                     const TileResult<Element>& result, unsigned char* shared) {
    const uint32 rows = (result.rows + kBlockM - 1) / kBlockM;
    const uint32 columns = (result.columns + kBlockN - 1) / kBlockN;
    if (blockIdx.x >= rows * columns) {
        return;
    }
    const TilePlace place = grouped_tile(blockIdx.x, rows, columns);
    const int32 row = place.row * kBlockM, column = place.column * kBlockN;
    Accumulators accumulators;
    multiply_tile<kVector>(accumulators, a, b, row, column, Fp4Range{0, a.k}, shared);
    multiply_by(accumulators, factor);
    store_tile<Element, kThreads>(result, row, column, warp_row(), warp_column(), accumulators,
                                  shared);
}

// a [m, k] and b [n, k], scales of both in tiles (layout/scale_tile.cuh), tensor scales [1], bias
// [n] or null, out [m, n]. `accumulate` adds to an FP32 result.
#define NVFP4_GEMM(name, vector, Element)                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        name(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,                    \
             const float* __restrict__ a_tensor_scale, const uint8* __restrict__ b,              \
             const uint8* __restrict__ b_scales, const float* __restrict__ b_tensor_scale,       \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate) {                                                       \
        extern __shared__ __align__(128) unsigned char shared[];                                 \
        gemm<vector>(Fp4Operand{a, a_scales, m, k}, Fp4Operand{b, b_scales, n, k},               \
                     __fmul_rn(__ldg(a_tensor_scale), __ldg(b_tensor_scale)),                    \
                     TileResult<Element>{out, bias, m, n, accumulate != 0}, shared);             \
    }

NVFP4_GEMM(sm120_nvfp4_gemm_bf16, true, bf16)
NVFP4_GEMM(sm120_nvfp4_gemm_bf16_scalar, false, bf16)
NVFP4_GEMM(sm120_nvfp4_gemm_f32, true, float)
NVFP4_GEMM(sm120_nvfp4_gemm_f32_scalar, false, float)
