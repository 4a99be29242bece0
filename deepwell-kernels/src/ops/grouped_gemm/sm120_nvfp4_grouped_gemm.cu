// The three GEMMs of a layer for each group of rows on NVFP4 operands: E2M1 data, two elements to a
// byte, one UE4M3 scale per 16 elements along the contraction, both by rows, and an FP32 scale for
// each group of an operand. Group e has the rows offsets[e] to offsets[e + 1], multiples of 64, of
// the buffer's R rows.
//   rows   out_e = a_e b[e]^T         a [R, K], b [G, N, K], out [R, N], BF16: fprop and dgrad
//   wgrad  out[e] (+)= a_e b_e^T      a [N, R], b [K, R], out [G, N, K], FP32
// Activations and gradients have one set of scales for all R rows; each matrix of b [G, N, K] has
// separate scales. Rows after all groups become zeros; a group without rows has a weight gradient
// of exactly zero, or adds nothing.
//
// The sums of elements times block scales are multiplied by the product of the group's scales in
// both operands and rounded; then stored results are added. A CTA computes one 128 x 128 tile of
// one group, see mma/nvfp4_block_scale.cuh. `_scalar` kernels read single bytes, for rows of other
// lengths than multiples of 32 elements. Sums run over the contraction in ascending order.
//
// architectures: sm_120a
#include "common/types.cuh"
#include "epilogue/group_scales.cuh"
#include "epilogue/store_tile.cuh"
#include "layout/scale_tile.cuh"
#include "mma/nvfp4_block_scale.cuh"
#include "scheduler/group_tiles.cuh"
#include "scheduler/tile_order.cuh"

using namespace nvfp4_tile;

constexpr uint32 kTile = kBlockM;
static_assert(kBlockN == kTile, "square tiles");
static_assert(kStagedBytes<float> <= NvFp4Steps::kStages * NvFp4Steps::kStageBytes,
              "the result goes through the stages");

extern __shared__ __align__(128) unsigned char shared[];

__device__ __forceinline__ uint32 tiles_of(int32 extent) {
    return (extent + kTile - 1) / kTile;
}

// Stores a tile times the factor of its group; a tile without sums has none.
template <typename Element>
__device__ __forceinline__ void store(const TileResult<Element>& result, int32 row, int32 column,
                                      Accumulators& accumulators, const GroupScales& scales,
                                      int32 group, bool has_sums) {
    multiply_by(accumulators, has_sums ? scales.product(group) : 1.0f);
    store_tile<Element, kThreads>(result, row, column, warp_row(), warp_column(), accumulators,
                                  shared);
}

// `row_tiles` is the largest possible number of row tiles.
template <bool kVector>
__device__ __forceinline__ void rows_of_groups(const Fp4Operand& a, const Fp4Operand& b,
                                               const GroupScales& scales, const int32* offsets,
                                               bf16* out, uint32 groups, uint32 row_tiles) {
    const int32 columns = b.outer, k = a.k;
    const TilePlace place = grouped_tile(blockIdx.x, row_tiles, tiles_of(columns));
    const GroupTile tile = group_tile<kTile>(offsets, groups, a.outer, place.row);
    const int32 column = place.column * kTile;
    if (tile.row >= tile.end || column >= columns) {
        return;
    }
    // Rows after all groups have an empty contraction, so their result is zero.
    const bool is_behind = tile.group == groups;
    const int64 group = is_behind ? 0 : tile.group;
    const int64 of_scales =
        static_cast<int64>(tiles_of(columns)) * b.scale_tiles() * kScaleTileBytes;
    const Fp4Operand of_rows{a.data, a.scales, tile.end, k};
    const Fp4Operand of_group{b.data + group * columns * b.row_bytes(),
                              b.scales + group * of_scales, columns, k};
    Accumulators accumulators;
    multiply_tile<kVector>(accumulators, of_rows, of_group, tile.row, column,
                           Fp4Range{0, is_behind ? 0 : k}, shared);
    store(TileResult<bf16>{out, nullptr, tile.end, columns, false}, tile.row, column,
          accumulators, scales, tile.group, !is_behind);
}

template <bool kVector>
__device__ __forceinline__ void weights_of_groups(const Fp4Operand& a, const Fp4Operand& b,
                                                  const GroupScales& scales, const int32* offsets,
                                                  float* out, bool accumulate) {
    const int32 n = a.outer, k = b.outer;
    const uint32 tiles = tiles_of(n) * tiles_of(k);
    const uint32 group = blockIdx.x / tiles;
    const TilePlace place = grouped_tile(blockIdx.x % tiles, tiles_of(n), tiles_of(k));
    const int32 first = offsets[group];
    const int32 count = offsets[group + 1] - first;
    if (count == 0 && accumulate) {
        return;
    }
    const int32 row = place.row * kTile, column = place.column * kTile;
    Accumulators accumulators;
    multiply_tile<kVector>(accumulators, a, b, row, column, Fp4Range{first, count}, shared);
    float* const of_group = out + static_cast<int64>(group) * n * k;
    store(TileResult<float>{of_group, nullptr, n, k, accumulate}, row, column, accumulators,
          scales, group, count > 0);
}

#define OPERANDS                                                                                 \
    const uint8 *__restrict__ a, const uint8 *__restrict__ a_scales,                             \
        const float *__restrict__ a_group_scales, const uint8 *__restrict__ b,                   \
        const uint8 *__restrict__ b_scales, const float *__restrict__ b_group_scales,            \
        const int32 *__restrict__ offsets

// a [rows, k], b [groups, columns, k], scales of both in tiles (layout/scale_tile.cuh), separate
// for each matrix of b, scales of groups [groups], offsets [groups + 1], out [rows, columns]. One
// CTA per row tile, of `row_tiles`, and column tile.
#define ROWS_GEMM(name, vector)                                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        name(OPERANDS, bf16* __restrict__ out, uint32 groups, int32 rows, int32 columns,         \
             int32 k, uint32 row_tiles) {                                                        \
        rows_of_groups<vector>(Fp4Operand{a, a_scales, rows, k},                                 \
                               Fp4Operand{b, b_scales, columns, k},                              \
                               GroupScales{a_group_scales, b_group_scales}, offsets, out,        \
                               groups, row_tiles);                                               \
    }

// a [n, rows], b [k, rows], scales of both in tiles, scales of groups [groups], offsets [groups +
// 1], out [groups, n, k], accumulated if `accumulate` is not zero. One CTA per tile of out.
#define WGRAD_GEMM(name, vector)                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        name(OPERANDS, float* __restrict__ out, int32 n, int32 k, int32 rows,                    \
             uint32 accumulate) {                                                                \
        weights_of_groups<vector>(Fp4Operand{a, a_scales, n, rows},                              \
                                  Fp4Operand{b, b_scales, k, rows},                              \
                                  GroupScales{a_group_scales, b_group_scales}, offsets, out,     \
                                  accumulate != 0);                                              \
    }

ROWS_GEMM(sm120_nvfp4_grouped_gemm_rows, true)
ROWS_GEMM(sm120_nvfp4_grouped_gemm_rows_scalar, false)
WGRAD_GEMM(sm120_nvfp4_grouped_gemm_wgrad, true)
WGRAD_GEMM(sm120_nvfp4_grouped_gemm_wgrad_scalar, false)
