// The three GEMMs of a layer for each group of rows on MXFP8 operands: E4M3 data and one E8M0 scale
// per 32 elements along the contraction. Group e has the rows offsets[e] to offsets[e + 1],
// multiples of 32, of the buffer's R rows.
//   rows   out_e = a_e b[e]^T         a [R, K], b [G, N, K], out [R, N], BF16: fprop and dgrad
//   wgrad  out[e] (+)= a_e b_e^T      a [N, R], b [K, R], out [G, N, K], FP32
// Activations and gradients have one set of scales for all R rows, so a group's tiles may begin
// inside a tile of scales; each matrix of b [G, N, K] has separate scales. Rows after all groups
// become zeros; a group without rows has a weight gradient of exactly zero, or adds nothing.
// Supports any architecture with mma.sync on E4M3, and any scales; see mma/mxfp8_factors.cuh. A CTA
// computes one 128 x 128 tile of one group. The `_scalar` kernel reads single elements, for K that
// is not a multiple of 16. Sums run over the contraction in ascending order.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "layout/scale_tile.cuh"
#include "mma/mxfp8_factors.cuh"
#include "mma/mxfp8_tile.cuh"
#include "scheduler/group_tiles.cuh"
#include "scheduler/tile_order.cuh"

using mxfp8_tile::FactorSteps;
using mxfp8_tile::Operand;

constexpr int kThreads = mxfp8_tile::kThreads;
constexpr uint32 kTile = mxfp8_tile::kBlockM;
static_assert(mxfp8_tile::kBlockN == kTile, "square tiles");
static_assert(kStagedBytes<float> <= mxfp8_tile::kSharedBytes,
              "the result goes through the stages");

extern __shared__ __align__(128) unsigned char shared[];

__device__ __forceinline__ uint32 tiles_of(int32 extent) {
    return (extent + kTile - 1) / kTile;
}

template <typename Element>
__device__ __forceinline__ void store(const TileResult<Element>& result, int32 row, int32 column,
                                      const mxfp8_tile::Accumulators& accumulators) {
    store_tile<Element, kThreads>(result, row, column, mxfp8_tile::warp_row(),
                                  mxfp8_tile::warp_column(), accumulators, shared);
}

// `row_tiles` is the largest possible number of row tiles.
template <bool kVector>
__device__ __forceinline__ void rows_of_groups(const uint8* a, const uint8* a_scales,
                                               const uint8* b, const uint8* b_scales,
                                               const int32* offsets, bf16* out, uint32 groups,
                                               int32 rows, int32 columns, int32 k,
                                               uint32 row_tiles) {
    const TilePlace place = grouped_tile(blockIdx.x, row_tiles, tiles_of(columns));
    const GroupTile tile = group_tile<kTile>(offsets, groups, rows, place.row);
    const int32 column = place.column * kTile;
    if (tile.row >= tile.end || column >= columns) {
        return;
    }
    // Rows after all groups have an empty contraction, so their result is zero.
    const bool is_behind = tile.group == groups;
    const int64 group = is_behind ? 0 : tile.group;
    const int64 of_scales =
        static_cast<int64>(tiles_of(columns)) * scale_tiles_across(k) * kScaleTileBytes;
    const int32 own_k = is_behind ? 0 : k;
    const Operand of_rows{a, a_scales, tile.end, own_k};
    const Operand of_group{b + group * columns * k, b_scales + group * of_scales, columns, own_k};
    mxfp8_tile::Accumulators accumulators;
    mxfp8_tile::mainloop<FactorSteps, kVector>(accumulators, of_rows, of_group, tile.row, column,
                                               shared);
    store(TileResult<bf16>{out, nullptr, tile.end, columns, false}, tile.row, column,
          accumulators);
}

// a [rows, k], b [groups, columns, k], scales of both in tiles (layout/scale_tile.cuh), separate
// for each matrix of b, offsets [groups + 1], out [rows, columns]. One CTA per row tile, of
// `row_tiles`, and column tile.
#define GROUPED_ROWS(name, vector)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        name(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,                    \
             const uint8* __restrict__ b, const uint8* __restrict__ b_scales,                    \
             const int32* __restrict__ offsets, bf16* __restrict__ out, uint32 groups,           \
             int32 rows, int32 columns, int32 k, uint32 row_tiles) {                             \
        rows_of_groups<vector>(a, a_scales, b, b_scales, offsets, out, groups, rows, columns, k, \
                               row_tiles);                                                       \
    }

GROUPED_ROWS(mxfp8_grouped_gemm_rows, true)
GROUPED_ROWS(mxfp8_grouped_gemm_rows_scalar, false)

// a [n, rows], b [k, rows], scales of both in tiles, offsets [groups + 1], out [groups, n, k]. One
// CTA per tile of out. `rows` is a multiple of 32.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mxfp8_grouped_gemm_wgrad(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,
                             const uint8* __restrict__ b, const uint8* __restrict__ b_scales,
                             const int32* __restrict__ offsets, float* __restrict__ out, int32 n,
                             int32 k, int32 rows, uint32 accumulate) {
    const uint32 tiles = tiles_of(n) * tiles_of(k);
    const uint32 group = blockIdx.x / tiles;
    const TilePlace place = grouped_tile(blockIdx.x % tiles, tiles_of(n), tiles_of(k));
    const int32 first = offsets[group];
    const int32 count = offsets[group + 1] - first;
    if (count == 0 && accumulate) {
        return;
    }
    const int32 row = place.row * kTile, column = place.column * kTile;
    const mxfp8_tile::Copy<true> copy_a(TileOperand<uint8>{a + first, rows, n, count}, row);
    const mxfp8_tile::Copy<true> copy_b(TileOperand<uint8>{b + first, rows, k, count}, column);
    const mxfp8_tile::SegmentScaleFetch scales(Operand{a, a_scales, n, rows},
                                               Operand{b, b_scales, k, rows}, row, column, first,
                                               count);
    mxfp8_tile::Accumulators accumulators;
    mxfp8_tile::mainloop_over<FactorSteps, true>(accumulators, copy_a, copy_b, scales,
                                                 tiles_of(count), shared);
    float* const of_group = out + static_cast<int64>(group) * n * k;
    store(TileResult<float>{of_group, nullptr, n, k, accumulate != 0}, row, column, accumulators);
}
