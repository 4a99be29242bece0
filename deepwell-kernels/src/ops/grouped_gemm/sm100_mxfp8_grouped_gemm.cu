// GEMMs of groups of rows, such as the tokens of each expert of a mixture, on MXFP8 operands: E4M3
// data and one E8M0 scale per 32 elements along K, in tiles (layout/scale_tile.cuh). Group e has
// rows offsets[e] to offsets[e + 1] of R, multiples of 32, possibly none.
//
// fprop and dgrad: out [R, N] = a [R, K] b[e] [N, K]^T, zero from the last offset on. wgrad: out[e]
// [M, N] (+)= a [M, R] b [N, R]^T over the columns of group e. For a group without rows the result
// is zero or, when accumulating, unchanged.
//
// Static persistent and warp specialized, see scheduler/sm100_grouped_tiles.cuh and
// mma/sm100_tile.cuh. Out-of-bounds elements of the operands read as zeros. Sums run over K in
// ascending order for any grid.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/sm100_mxfp8_grouped_gemm.cuh"

using namespace sm100_grouped;

extern __shared__ __align__(1024) uint8 memory[];

#define OPERANDS                                                                                 \
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,             \
        const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,         \
        const int32 *__restrict__ offsets

// a [rows, k] in boxes of 128 rows, b [groups * columns, k] in boxes of tile_n / ctas rows, both of
// 128 columns and swizzled by 128 bytes; scales in boxes of a tile, with separate tiles for each
// matrix of b; offsets [groups + 1], out [rows, columns].
#define ROWS_GEMM(name, ctas, tile_n)                                                            \
    extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(kThreads, 1)       \
        name(OPERANDS, bf16* __restrict__ out, int32 groups, int32 rows, int32 columns,          \
             int32 k) {                                                                          \
        using S = Shape<ctas, tile_n>;                                                           \
        grouped_gemm<S>(Operand{a, a_scales, rows}, Operand{b, b_scales, columns}, k,            \
                        GroupedRowTiles<S>(offsets, groups, rows, columns, k), memory,           \
                        [&](const GroupedTile& tile) {                                           \
                            return TileResult<bf16>{out, nullptr, tile.end_row, columns, false}; \
                        });                                                                      \
    }

// a [rows, k] and b [columns, k] as above, where k counts the rows of all groups; out [groups,
// rows, columns], accumulated if `accumulate` is not zero.
#define WGRAD_GEMM(name, ctas, tile_n)                                                           \
    extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(kThreads, 1)       \
        name(OPERANDS, float* __restrict__ out, int32 groups, int32 rows, int32 columns,         \
             int32 k, uint32 accumulate) {                                                       \
        using S = Shape<ctas, tile_n>;                                                           \
        grouped_gemm<S>(Operand{a, a_scales, rows}, Operand{b, b_scales, columns}, k,            \
                        GroupedResultTiles<S>(offsets, groups, rows, columns), memory,           \
                        [&](const GroupedTile& tile) {                                           \
                            const int64 first = static_cast<int64>(tile.group) * rows * columns; \
                            return TileResult<float>{out + first, nullptr, rows, columns,        \
                                                     accumulate != 0};                           \
                        });                                                                      \
    }

#define GEMMS(tile, ...)                                                                         \
    ROWS_GEMM(sm100_mxfp8_grouped_gemm_rows_##tile, __VA_ARGS__)                                 \
    WGRAD_GEMM(sm100_mxfp8_grouped_gemm_wgrad_##tile, __VA_ARGS__)

GEMMS(128x128, 1, 128)
GEMMS(128x256, 1, 256)
GEMMS(256x128, 2, 128)
GEMMS(256x256, 2, 256)
