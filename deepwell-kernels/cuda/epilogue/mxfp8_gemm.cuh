// Kernels out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands, with one CTA per 128
// x 128 tile of the result. Tiles at the edges read zeros and store only elements inside. Sums run
// over K in ascending order for every grid.
#pragma once

#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/mxfp8_tile.cuh"
#include "scheduler/tile_order.cuh"

static_assert(kStagedBytes<float> <= mxfp8_tile::kSharedBytes,
              "the result goes through the stages");

// Computes the tile of a CTA; CTAs beyond the last tile exit. `Steps` and `kVector` as in
// mxfp8_tile::mainloop.
template <typename Steps, bool kVector, typename Element>
__device__ __forceinline__ void mxfp8_gemm_cta(const mxfp8_tile::Operand& a,
                                                 const mxfp8_tile::Operand& b,
                                                 const TileResult<Element>& result,
                                                 unsigned char* shared) {
    const uint32 rows = (result.rows + mxfp8_tile::kBlockM - 1) / mxfp8_tile::kBlockM;
    const uint32 columns = (result.columns + mxfp8_tile::kBlockN - 1) / mxfp8_tile::kBlockN;
    if (blockIdx.x >= rows * columns) {
        return;
    }
    const TilePlace place = grouped_tile(blockIdx.x, rows, columns);
    const int32 row = place.row * mxfp8_tile::kBlockM;
    const int32 column = place.column * mxfp8_tile::kBlockN;
    mxfp8_tile::Accumulators accumulators;
    mxfp8_tile::mainloop<Steps, kVector>(accumulators, a, b, row, column, shared);
    store_tile<Element, mxfp8_tile::kThreads>(result, row, column, mxfp8_tile::warp_row(),
                                              mxfp8_tile::warp_column(), accumulators, shared);
}

// a [m, k] and b [n, k], scales of both in tiles (layout/scale_tile.cuh), bias [n] or null, out [m,
// n]. `accumulate` adds to an FP32 result. `vector`: elements are copied 16 at a time, which
// requires k to be a multiple of 16; otherwise one by one.
#define MXFP8_GEMM(name, Steps, vector, Element)                                                 \
    extern "C" __global__ void __launch_bounds__(mxfp8_tile::kThreads, 1)                        \
        name(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,                    \
             const uint8* __restrict__ b, const uint8* __restrict__ b_scales,                    \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate) {                                                       \
        extern __shared__ __align__(128) unsigned char shared[];                                 \
        mxfp8_gemm_cta<Steps, vector>(mxfp8_tile::Operand{a, a_scales, m, k},                    \
                                        mxfp8_tile::Operand{b, b_scales, n, k},                  \
                                        TileResult<Element>{out, bias, m, n, accumulate != 0},   \
                                        shared);                                                 \
    }
