// GEMMs of groups of rows, such as the tokens of each expert of a mixture, on NVFP4 operands: E2M1
// data and one UE4M3 scale per 16 elements along K, in tiles (layout/scale_tile.cuh), and an FP32
// scale for each group of an operand. Group e has rows offsets[e] to offsets[e + 1] of R, multiples
// of 128, possibly none: a tile of scales belongs to one group.
//
// fprop and dgrad: out [R, N] = a [R, K] b[e] [N, K]^T, zero from the last offset on. wgrad: out[e]
// [M, N] (+)= a [M, R] b [N, R]^T over the columns of group e. For a group without rows the result
// is zero or, when accumulating, unchanged. The sums of elements times block scales are multiplied
// by the product of the group's scales in both operands and rounded.
//
// Static persistent and warp specialized, see scheduler/sm100_grouped_tiles.cuh and
// mma/sm100_tile.cuh; data, scales and MMAs as in mma/sm100_nvfp4_tile.cuh. Out-of-bounds elements
// of the operands read as zeros. Sums run over K in ascending order for any grid.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/group_scales.cuh"
#include "epilogue/sm100_mxfp8_grouped_gemm.cuh"
#include "epilogue/store_tensor_tile.cuh"
#include "mma/sm100_nvfp4_tile.cuh"
#include "scheduler/sm100_grouped_tiles.cuh"

using sm100_scaled::Operand;

extern __shared__ __align__(1024) uint8 memory[];

// Tiles after all groups have no accumulator.
__device__ __forceinline__ float factor_of(const GroupedTile& tile, const GroupScales& scales,
                                           int32 groups) {
    return tile.group < groups ? scales.product(tile.group) : 0.0f;
}

// Tiles whose ranges along K are in bytes, as the stages of a pipeline count them. Two elements of
// a byte belong to one group.
template <typename Tiles>
struct TilesOfBytes {
    using Tile = GroupedTile;

    Tiles tiles;

    __device__ __forceinline__ bool next(GroupedTile& tile) {
        if (!tiles.next(tile)) {
            return false;
        }
        tile.first_k /= 2;
        tile.end_k /= 2;
        return true;
    }
};

template <typename S, typename Element, typename Tiles, typename ResultOf>
__device__ __forceinline__ void gemm(const Operand& a, const Operand& b, int32 k, Tiles tiles,
                                     GroupScales scales, int32 groups, ResultOf result_of) {
    sm100_grouped::grouped_gemm<S>(
        a, b, k, TilesOfBytes<Tiles>{tiles}, memory, [&](const GroupedTile& tile) {
            return ScaledResult<Element>{result_of(tile), factor_of(tile, scales, groups)};
        });
}

#define OPERANDS                                                                                 \
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,             \
        const float *__restrict__ a_group_scales, const __grid_constant__ TensorMap b,           \
        const __grid_constant__ TensorMap b_scales, const float *__restrict__ b_group_scales,    \
        const int32 *__restrict__ offsets

// a [rows, k] in boxes of 128 rows, b [groups * columns, k] in boxes of tile_n / ctas rows, both of
// 128 bytes and swizzled by 128 bytes; scales in boxes of a stage (mma/sm100_nvfp4_tile.cuh), of
// 128 rows of a and of tile_n rows of b, with separate tiles for each matrix of b; offsets
// [groups + 1], out [rows, columns].
#define ROWS_GEMM(name, ctas, tile_n)                                                            \
    extern "C" __global__ void __cluster_dims__(ctas, 1, 1)                                      \
        __launch_bounds__(sm100::kThreads, 1)                                                    \
            name(OPERANDS, bf16* __restrict__ out, int32 groups, int32 rows, int32 columns,      \
                 int32 k) {                                                                      \
        using S = sm100_nvfp4::Shape<ctas, tile_n>;                                              \
        gemm<S, bf16>(Operand{a, a_scales, rows}, Operand{b, b_scales, columns}, k,              \
                      GroupedRowTiles<S>(offsets, groups, rows, columns, k),                     \
                      GroupScales{a_group_scales, b_group_scales}, groups,                       \
                      [&](const GroupedTile& tile) {                                             \
                          return TileResult<bf16>{out, nullptr, tile.end_row, columns, false};   \
                      });                                                                        \
    }

// a [rows, k] and b [columns, k] as above, where k counts the rows of all groups; out [groups,
// rows, columns], accumulated if `accumulate` is not zero.
#define WGRAD_GEMM(name, ctas, tile_n)                                                           \
    extern "C" __global__ void __cluster_dims__(ctas, 1, 1)                                      \
        __launch_bounds__(sm100::kThreads, 1)                                                    \
            name(OPERANDS, float* __restrict__ out, int32 groups, int32 rows, int32 columns,     \
                 int32 k, uint32 accumulate) {                                                   \
        using S = sm100_nvfp4::Shape<ctas, tile_n>;                                              \
        gemm<S, float>(                                                                          \
            Operand{a, a_scales, rows}, Operand{b, b_scales, columns}, k,                        \
            GroupedResultTiles<S>(offsets, groups, rows, columns),                               \
            GroupScales{a_group_scales, b_group_scales}, groups,                                 \
            [&](const GroupedTile& tile) {                                                       \
                const int64 first = static_cast<int64>(tile.group) * rows * columns;             \
                return TileResult<float>{out + first, nullptr, rows, columns, accumulate != 0};  \
            });                                                                                  \
    }

#define GEMMS(tile, ...)                                                                         \
    ROWS_GEMM(sm100_nvfp4_grouped_gemm_rows_##tile, __VA_ARGS__)                                 \
    WGRAD_GEMM(sm100_nvfp4_grouped_gemm_wgrad_##tile, __VA_ARGS__)

GEMMS(128x128, 1, 128)
GEMMS(128x256, 1, 256)
GEMMS(256x128, 2, 128)
GEMMS(256x256, 2, 256)
