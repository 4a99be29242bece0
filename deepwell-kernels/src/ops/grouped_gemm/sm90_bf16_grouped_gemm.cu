// GEMMs of groups of rows, such as the tokens of each expert of a mixture, on BF16 operands. Group
// e has rows offsets[e] to offsets[e + 1] of R, possibly none.
//
// fprop: out [R, N] = a [R, K] b[e] [N, K]^T. dgrad: out [R, N] = a [R, K] b[e] [K, N]. Both are
// zero from the last offset on. wgrad: out[e] [M, N] (+)= a [R, M]^T b [R, N] over the rows of
// group e, multiples of 16; for K-major operands a [M, R] b [N, R]^T. For a group without rows the
// result is zero or, when accumulating, unchanged.
//
// K-major operands may be elements times block scales, with an FP32 scale for each group of an
// operand: the sums are multiplied by the product of the group's scales in both operands.
//
// Static persistent and warp specialized, see scheduler/grouped_tiles.cuh and
// mma/sm90_bf16_tile.cuh. A tile has up to 256 rows of a group. Out-of-bounds elements of the
// operands read as zeros; results for rows of the next group are not stored. Sums run over K in
// ascending order for any grid.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/group_scales.cuh"
#include "epilogue/sm90_store_tile.cuh"
#include "mma/sm90_bf16_tile.cuh"
#include "scheduler/grouped_tiles.cuh"

using namespace sm90_bf16;

extern __shared__ __align__(1024) uint8 memory[];

template <Layout kLayout, bool kByGroups = false>
using Shape = TileShape<kLayout, 2, kTileN, 1, true, kByGroups>;

constexpr int kTileM = Shape<Layout::kRows>::kTileM;

// Common to both kinds of tiles.
__device__ __forceinline__ TileWork work_of(const GroupTile& tile) {
    TileWork work;
    work.place = tile.place;
    work.end = tile.end;
    work.group = tile.group;
    work.waves = tile.end - static_cast<int32>(tile.place.row) > kWaveM ? 2 : 1;
    return work;
}

// Tiles of out [R, N].
class RowTiles {
    GroupedRowTiles<kTileM, kTileN> tiles_;
    int32 groups_;
    uint32 columns_;
    int32 stages_;

  public:
    __device__ __forceinline__ RowTiles(const int32* offsets, int32 groups, int32 rows,
                                        int32 columns, int32 k)
        : tiles_(offsets, groups, rows, columns),
          groups_(groups),
          columns_(columns),
          stages_((k + kStageK - 1) / kStageK) {}

    __device__ __forceinline__ bool next(TileWork& work) {
        GroupTile tile;
        if (!tiles_.next(tile)) {
            return false;
        }
        work = work_of(tile);
        work.b_row = tile.group * columns_ + tile.place.column;
        work.first_k = 0;
        work.stages = tile.group < groups_ ? stages_ : 0;
        work.last_steps = kSteps;
        return true;
    }
};

// Tiles of out [groups, M, N].
class ResultTiles {
    GroupedResultTiles<kTileM, kTileN> tiles_;
    const int32* offsets_;

  public:
    __device__ __forceinline__ ResultTiles(const int32* offsets, int32 groups, int32 rows,
                                           int32 columns)
        : tiles_(groups, rows, columns), offsets_(offsets) {}

    __device__ __forceinline__ bool next(TileWork& work) {
        GroupTile tile;
        if (!tiles_.next(tile)) {
            return false;
        }
        work = work_of(tile);
        work.b_row = tile.place.column;
        work.first_k = offsets_[tile.group];
        const int32 steps = (offsets_[tile.group + 1] - work.first_k) / kStepK;
        work.stages = (steps + kSteps - 1) / kSteps;
        work.last_steps = steps - (work.stages - 1) * kSteps;
        return true;
    }
};

// The factor of a tile's sums; a tile without sums may belong to no group.
__device__ __forceinline__ float factor_of(const TileWork& work, const GroupScales& scales) {
    return scales.a == nullptr || work.stages == 0 ? 1.0f : scales.product(work.group);
}

template <Layout kLayout>
__device__ __forceinline__ void rows_gemm(const TensorMap& a, const TensorMap& b,
                                          const int32* offsets, bf16* out, int32 groups,
                                          int32 rows, int32 columns, int32 k,
                                          GroupScales scales) {
    const RowTiles tiles(offsets, groups, rows, columns, k);
    multiply<Shape<kLayout>>(
        memory, a, b, tiles,
        [&](const TileWork& work, uint32 row, const float(&sums)[64], uint8* staged) ALWAYS_INLINE {
            const TileResult<bf16> result{out, nullptr, work.end, columns, false};
            store_wgmma_rows(result, work.place.row + row, work.place.column, sums, staged,
                             factor_of(work, scales));
        });
}

// a [rows, k] in boxes of 128 rows, b [groups * columns, k] in boxes of 128 rows, both of 64
// columns and swizzled by 128 bytes; offsets [groups + 1], out [rows, columns], scales of groups
// [groups] or null.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_bf16_grouped_gemm_fprop(const __grid_constant__ TensorMap a,
                                 const __grid_constant__ TensorMap b,
                                 const int32* __restrict__ offsets, bf16* __restrict__ out,
                                 int32 groups, int32 rows, int32 columns, int32 k,
                                 const float* __restrict__ a_scales,
                                 const float* __restrict__ b_scales) {
    rows_gemm<Layout::kRows>(a, b, offsets, out, groups, rows, columns, k,
                             GroupScales{a_scales, b_scales});
}

// The same, with b [1, groups, k, columns] in boxes of 64 by 64 and without scales.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_bf16_grouped_gemm_dgrad(const __grid_constant__ TensorMap a,
                                 const __grid_constant__ TensorMap b,
                                 const int32* __restrict__ offsets, bf16* __restrict__ out,
                                 int32 groups, int32 rows, int32 columns, int32 k) {
    rows_gemm<Layout::kStack>(a, b, offsets, out, groups, rows, columns, k,
                              GroupScales{nullptr, nullptr});
}

template <typename S>
__device__ __forceinline__ void weights_gemm(const TensorMap& a, const TensorMap& b,
                                             const int32* offsets, float* out, int32 groups,
                                             int32 rows, int32 columns, bool accumulate,
                                             GroupScales scales) {
    const ResultTiles tiles(offsets, groups, rows, columns);
    multiply<S>(
        memory, a, b, tiles,
        [&](const TileWork& work, uint32 row, const float(&sums)[64], uint8* staged) ALWAYS_INLINE {
            if (accumulate && work.stages == 0) {
                return;
            }
            float* of_group = out + static_cast<int64>(work.group) * rows * columns;
            const TileResult<float> result{of_group, nullptr, work.end, columns, accumulate};
            store_wgmma_rows(result, work.place.row + row, work.place.column, sums, staged,
                             factor_of(work, scales));
        });
}

// a [R, rows] and b [R, columns] in boxes of 64 by 64, swizzled by 128 bytes; offsets [groups + 1],
// out [groups, rows, columns], accumulated if `accumulate` is not zero.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_bf16_grouped_gemm_wgrad(const __grid_constant__ TensorMap a,
                                 const __grid_constant__ TensorMap b,
                                 const int32* __restrict__ offsets, float* __restrict__ out,
                                 int32 groups, int32 rows, int32 columns, uint32 accumulate) {
    weights_gemm<Shape<Layout::kColumns>>(a, b, offsets, out, groups, rows, columns,
                                          accumulate != 0, GroupScales{nullptr, nullptr});
}

// The same, with a [rows, R] and b [columns, R], in boxes of 128 rows and 64 columns, and scales of
// groups [groups] or null.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sm90_bf16_grouped_gemm_wgrad_k_major(const __grid_constant__ TensorMap a,
                                         const __grid_constant__ TensorMap b,
                                         const int32* __restrict__ offsets,
                                         float* __restrict__ out, int32 groups, int32 rows,
                                         int32 columns, uint32 accumulate,
                                         const float* __restrict__ a_scales,
                                         const float* __restrict__ b_scales) {
    weights_gemm<Shape<Layout::kRows, true>>(a, b, offsets, out, groups, rows, columns,
                                             accumulate != 0, GroupScales{a_scales, b_scales});
}
