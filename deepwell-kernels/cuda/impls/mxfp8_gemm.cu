// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands: E4M3 codes and one E8M0 scale
// for each 32 of them along K. All three products of a linear layer have this form.
//
// For any architecture that has mma.sync on E4M3, and for any scales; see mma/mxfp8_tile.cuh. A
// block computes one 128 x 128 tile; tiles at the edges read zeros and write what is inside.
// `_scalar` kernels read code by code, for K that is not a multiple of 16. Sums run over K in
// ascending order whatever the grid.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/mxfp8_tile.cuh"
#include "scheduler/tile_order.cuh"

constexpr int kThreads = mxfp8_tile::kThreads;
static_assert(kStagedBytes<float> <= mxfp8_tile::kSharedBytes,
              "the result goes through the stages");

extern __shared__ __align__(128) unsigned char shared[];

// Blocks beyond the last tile do nothing.
template <bool kVector, typename Element>
__device__ __forceinline__ void gemm(const mxfp8_tile::Operand& a, const mxfp8_tile::Operand& b,
                                     const TileResult<Element>& result) {
    const uint32 rows = (result.rows + mxfp8_tile::kBlockM - 1) / mxfp8_tile::kBlockM;
    const uint32 columns = (result.columns + mxfp8_tile::kBlockN - 1) / mxfp8_tile::kBlockN;
    if (blockIdx.x >= rows * columns) {
        return;
    }
    const TilePlace place = grouped_tile(blockIdx.x, rows, columns);
    const int32 row = place.row * mxfp8_tile::kBlockM;
    const int32 column = place.column * mxfp8_tile::kBlockN;
    mxfp8_tile::Accumulators accumulators;
    mxfp8_tile::product<kVector>(accumulators, a, b, row, column, shared);
    store_tile<Element, kThreads>(result, row, column, mxfp8_tile::warp_row(),
                                  mxfp8_tile::warp_column(), accumulators, shared);
}

// a [m, k], a_scales [m, ceil(k / 32)], b [n, k], b_scales [n, ceil(k / 32)], bias [n] or null,
// out [m, n]; `accumulate` adds to what is in an FP32 result.
#define MXFP8_GEMM(name, vector, Element)                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        name(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,                    \
             const uint8* __restrict__ b, const uint8* __restrict__ b_scales,                    \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate) {                                                       \
        gemm<vector>(mxfp8_tile::Operand{a, a_scales, m, k},                                     \
                     mxfp8_tile::Operand{b, b_scales, n, k},                                     \
                     TileResult<Element>{out, bias, m, n, accumulate != 0});                     \
    }

MXFP8_GEMM(mxfp8_gemm_bf16, true, bf16)
MXFP8_GEMM(mxfp8_gemm_bf16_scalar, false, bf16)
MXFP8_GEMM(mxfp8_gemm_f32, true, float)
MXFP8_GEMM(mxfp8_gemm_f32_scalar, false, float)
