// The three GEMMs of a layer for each group of rows, in BF16 with FP32 accumulation, on mma.sync.
// Group e has the rows offsets[e] to offsets[e + 1] of the buffer's R rows; x_e denotes these rows
// of x.
//   fprop  y_e  = x_e w[e]^T        x [R, K], w [G, N, K], y [R, N], BF16
//   dgrad  dx_e = dy_e w[e]         dy [R, N], dx [R, K], BF16
//   wgrad  dw[e] (+)= dy_e^T x_e    dw [G, N, K], FP32
// Rows after all groups become zeros; a group without rows has a weight gradient of exactly zero,
// or adds nothing. A CTA computes one 128 x 128 tile of one group, see mma/bf16_tile.cuh. `_scalar`
// kernels read single elements, for rows whose length is not a multiple of eight elements. Sums run
// over K (in wgrad, over a group's rows) in ascending order.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/bf16_tile.cuh"
#include "scheduler/group_tiles.cuh"
#include "scheduler/tile_order.cuh"

constexpr int kThreads = bf16_tile::kThreads;
constexpr uint32 kTile = bf16_tile::kBlockM;
static_assert(bf16_tile::kBlockN == kTile, "square tiles");
static_assert(kStagedBytes<float> <= bf16_tile::kSharedBytes, "the result goes through the stages");

extern __shared__ __align__(128) unsigned char shared[];

__device__ __forceinline__ uint32 tiles_of(int32 extent) {
    return (extent + kTile - 1) / kTile;
}

template <typename Element>
__device__ __forceinline__ void store(const TileResult<Element>& result, int32 row, int32 column,
                                      const bf16_tile::Accumulators& accumulators) {
    store_tile<Element, kThreads>(result, row, column, bf16_tile::warp_row(),
                                  bf16_tile::warp_column(), accumulators, shared);
}

// out_e = a_e b[e]: a [rows, k], b[e] [columns, k] if kBKMajor, else [k, columns], out [rows,
// columns]. `row_tiles` is the largest possible number of row tiles.
template <bool kBKMajor, bool kVector>
__device__ __forceinline__ void rows_of_groups(const bf16* a, const bf16* b,
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
    const bf16* const of_group =
        b + static_cast<int64>(is_behind ? 0 : tile.group) * columns * k;
    const int32 own_k = is_behind ? 0 : k;
    bf16_tile::Accumulators accumulators;
    bf16_tile::mainloop<true, kBKMajor, kVector>(
        accumulators, TileOperand<bf16>{a, k, tile.end, own_k},
        TileOperand<bf16>{of_group, kBKMajor ? k : columns, columns, own_k}, tile.row, column,
        shared);
    store(TileResult<bf16>{out, nullptr, tile.end, columns, false}, tile.row, column,
          accumulators);
}

template <bool kVector>
__device__ __forceinline__ void wgrad(const bf16* dy, const bf16* x, const int32* offsets,
                                      float* dw, int32 n, int32 k, uint32 accumulate) {
    const uint32 tiles = tiles_of(n) * tiles_of(k);
    const uint32 group = blockIdx.x / tiles;
    const TilePlace place = grouped_tile(blockIdx.x % tiles, tiles_of(n), tiles_of(k));
    const int32 first = offsets[group];
    const int32 count = offsets[group + 1] - first;
    if (count == 0 && accumulate) {
        return;
    }
    const int32 row = place.row * kTile, column = place.column * kTile;
    bf16_tile::Accumulators accumulators;
    bf16_tile::mainloop<false, false, kVector>(
        accumulators, TileOperand<bf16>{dy + static_cast<int64>(first) * n, n, n, count},
        TileOperand<bf16>{x + static_cast<int64>(first) * k, k, k, count}, row, column, shared);
    float* const of_group = dw + static_cast<int64>(group) * n * k;
    store(TileResult<float>{of_group, nullptr, n, k, accumulate != 0}, row, column, accumulators);
}

// a [rows, k], b [groups, columns, k] for fprop and [groups, k, columns] for dgrad, offsets [groups
// + 1], out [rows, columns]. One CTA per row tile, of `row_tiles`, and column tile.
#define GROUPED_ROWS(name, b_k_major, vector)                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        name(const bf16* __restrict__ a, const bf16* __restrict__ b,                             \
             const int32* __restrict__ offsets, bf16* __restrict__ out, uint32 groups,           \
             int32 rows, int32 columns, int32 k, uint32 row_tiles) {                             \
        rows_of_groups<b_k_major, vector>(a, b, offsets, out, groups, rows, columns, k,          \
                                          row_tiles);                                            \
    }

// dy [rows, n], x [rows, k], dw [groups, n, k]; one CTA per tile of dw.
#define GROUPED_WGRAD(name, vector)                                                              \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        name(const bf16* __restrict__ dy, const bf16* __restrict__ x,                            \
             const int32* __restrict__ offsets, float* __restrict__ dw, int32 n, int32 k,        \
             uint32 accumulate) {                                                                \
        wgrad<vector>(dy, x, offsets, dw, n, k, accumulate);                                     \
    }

GROUPED_ROWS(bf16_grouped_gemm_fprop, true, true)
GROUPED_ROWS(bf16_grouped_gemm_fprop_scalar, true, false)
GROUPED_ROWS(bf16_grouped_gemm_dgrad, false, true)
GROUPED_ROWS(bf16_grouped_gemm_dgrad_scalar, false, false)
GROUPED_WGRAD(bf16_grouped_gemm_wgrad, true)
GROUPED_WGRAD(bf16_grouped_gemm_wgrad_scalar, false)
