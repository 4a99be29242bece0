// GEMMs of groups of rows, such as the tokens of each expert of a mixture, on MXFP8 operands with
// one scale per 128 elements along K: E4M3, and E8M0 scales in tiles (layout/scale_tile.cuh). Group
// e has rows offsets[e] to offsets[e + 1] of R, multiples of 128, possibly none.
//
// fprop and dgrad: out [R, N] = a [R, K] b[e] [N, K]^T, zero from the last offset on. wgrad: out[e]
// [M, N] (+)= a [M, R] b [N, R]^T over the columns of group e. For a group without rows the result
// is zero or, when accumulating, unchanged.
//
// Static persistent and warp specialized, see scheduler/grouped_tiles.cuh and
// mma/sm90_mxfp8_tile.cuh. A tile has 256 rows of a group, or the group's last 128. Out-of-bounds
// elements of the operands read as zeros; results for columns of the next group's b are not stored.
// Sums run over K in ascending order for any grid.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_store_tile.cuh"
#include "epilogue/sm90_tensor_store.cuh"
#include "mma/sm90_mxfp8_tile.cuh"
#include "scheduler/grouped_tiles.cuh"

using namespace sm90_mxfp8;

extern __shared__ __align__(1024) uint8 memory[];

template <bool kScalesByColumn>
using Shape = TileShape<2, 1, kScalesByColumn, true>;
using CopiedShape = TileShape<2, 1, true, true, kStagedRowsBytes>;
constexpr int kTileM = Shape<true>::kTileM;

// Waves of a tile with rows of the result.
__device__ __forceinline__ int32 waves_of(const GroupTile& tile) {
    return tile.end - static_cast<int32>(tile.place.row) > kWaveM ? 2 : 1;
}

// Tiles of out [R, N].
class RowTiles {
    GroupedRowTiles<kTileM, kTileN> tiles_;
    int32 groups_;
    uint32 columns_;
    int32 k_blocks_;

  public:
    __device__ __forceinline__ RowTiles(const int32* offsets, int32 groups, int32 rows,
                                        int32 columns, int32 k_blocks)
        : tiles_(offsets, groups, rows, columns),
          groups_(groups),
          columns_(columns),
          k_blocks_(k_blocks) {}

    __device__ __forceinline__ bool next(TileWork& work) {
        GroupTile tile;
        if (!tiles_.next(tile)) {
            return false;
        }
        const TilePlace place = tile.place;
        const uint32 scale_rows = (columns_ + kScaleTileRows - 1) / kScaleTileRows;
        work.place = place;
        work.end = tile.end;
        work.group = tile.group;
        work.b_row = tile.group * columns_ + place.column;
        work.b_scale_row = tile.group * scale_rows + place.column / kScaleTileRows;
        work.first_k = 0;
        work.stages = tile.group < groups_ ? k_blocks_ : 0;
        work.waves = waves_of(tile);
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
        const TilePlace place = tile.place;
        work.place = place;
        work.end = tile.end;
        work.group = tile.group;
        work.b_row = place.column;
        work.b_scale_row = place.column / kScaleTileRows;
        work.first_k = offsets_[tile.group];
        work.stages = (offsets_[tile.group + 1] - work.first_k) / kStageK;
        work.waves = waves_of(tile);
        return true;
    }
};

template <bool kScalesByColumn>
__device__ __forceinline__ void rows_gemm(const Operand& a, const Operand& b,
                                          const int32* offsets, bf16* out, int32 groups,
                                          int32 rows, int32 columns, int32 k) {
    const int32 k_blocks = (k + kStageK - 1) / kStageK;
    const RowTiles tiles(offsets, groups, rows, columns, k_blocks);
    multiply<Shape<kScalesByColumn>>(
        memory, a, b, tiles, k_blocks,
        [&](const TileWork& work, uint32 row, const float(&sums)[64], uint8* staged) ALWAYS_INLINE {
            const TileResult<bf16> result{out, nullptr, work.end, columns, false};
            store_wgmma_rows(result, work.place.row + row, work.place.column, sums, staged);
        });
}

// a [rows, k] in boxes of 128 rows, b [groups * columns, k] in boxes of 128 rows, both of 128
// columns and swizzled by 128 bytes; scales in boxes of a tile, with separate tiles for each matrix
// of b; offsets [groups + 1], out [rows, columns]. `by_column`: each row of b has its own scales;
// otherwise 128 x 128 elements share one.
#define ROWS_GEMM(name, by_column)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,    \
             const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,    \
             const int32* __restrict__ offsets, bf16* __restrict__ out, int32 groups,            \
             int32 rows, int32 columns, int32 k) {                                               \
        rows_gemm<by_column>(Operand{a, a_scales}, Operand{b, b_scales}, offsets, out, groups,   \
                             rows, columns, k);                                                  \
    }

ROWS_GEMM(sm90_mxfp8_grouped_gemm_squares, false)
ROWS_GEMM(sm90_mxfp8_grouped_gemm_rows, true)

// a [rows, k] and b [columns, k] as above, where k counts the rows of all groups; out [groups,
// rows, columns] as [groups, columns / 32, rows, 32] in boxes of [1, 4, 16, 32], swizzled by 128
// bytes.
//
// Budget: 64 experts of 1408 x 2048 with 1536 rows each are 567 GFLOP, 370 us at 1530 TFLOP/s, and
// move 738 MB of results and 340 MB of operands, 260 us. A tile has about twelve stages and is 128
// KiB, so a tile's stores must be overlapped with the next tile's stages. The staging buffer
// replaces one of four stages.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_mxfp8_grouped_gemm_wgrad(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,
    const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,
    const __grid_constant__ TensorMap out, const int32* __restrict__ offsets, int32 groups,
    int32 rows, int32 columns, int32 k) {
    const ResultTiles tiles(offsets, groups, rows, columns);
    multiply<CopiedShape>(
        memory, Operand{a, a_scales}, Operand{b, b_scales}, tiles, (k + kStageK - 1) / kStageK,
        [&](const TileWork& work, uint32 row, const float(&sums)[64], uint8* staged) ALWAYS_INLINE {
            tensor_store_wgmma_rows(out, work.group, work.place.row + row, work.place.column, sums,
                                    staged);
        });
    // A CTA must not exit while copies read its shared memory.
    tensor_store_wait_read();
}

// The same GEMM with out [groups, rows, columns] of any width, accumulated if `accumulate` is not
// zero.
extern "C" __global__ void __launch_bounds__(kThreads, 1) sm90_mxfp8_grouped_gemm_wgrad_add(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,
    const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,
    const int32* __restrict__ offsets, float* __restrict__ out, int32 groups, int32 rows,
    int32 columns, int32 k, uint32 accumulate) {
    const ResultTiles tiles(offsets, groups, rows, columns);
    multiply<Shape<true>>(
        memory, Operand{a, a_scales}, Operand{b, b_scales}, tiles, (k + kStageK - 1) / kStageK,
        [&](const TileWork& work, uint32 row, const float(&sums)[64], uint8* staged) ALWAYS_INLINE {
            if (accumulate != 0 && work.stages == 0) {
                return;
            }
            float* of_group = out + static_cast<int64>(work.group) * rows * columns;
            const TileResult<float> result{of_group, nullptr, work.end, columns, accumulate != 0};
            store_wgmma_rows(result, work.place.row + row, work.place.column, sums, staged);
        });
}
