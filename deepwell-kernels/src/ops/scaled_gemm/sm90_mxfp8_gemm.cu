// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands with one scale per 128
// elements along K: E4M3, and E8M0 scales in tiles (layout/scale_tile.cuh). All three GEMMs of a
// linear layer have this form.
//
// Static persistent: a CTA computes tile after tile in an order that keeps operands in the L2
// cache. Warp specialized, see mma/sm90_mxfp8_tile.cuh. Out-of-bounds elements of the operands read
// as zeros. K is a multiple of 16, as tensor copies require, and no operand is empty. Sums run over
// K in ascending order for any grid.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_store_tile.cuh"
#include "mma/sm90_mxfp8_tile.cuh"
#include "scheduler/persistent_tiles.cuh"

using namespace sm90_mxfp8;

extern __shared__ __align__(1024) uint8 memory[];

// The tiles of the result.
template <typename S>
class Tiles {
    PersistentTiles<S::kTileM, kTileN, S::kAcross> places_;
    int32 rows_;
    int32 k_blocks_;

  public:
    __device__ __forceinline__ Tiles(int32 rows, int32 columns, int32 k_blocks)
        : places_(rows, columns), rows_(rows), k_blocks_(k_blocks) {}

    __device__ __forceinline__ bool next(TileWork& work) {
        TilePlace place;
        if (!places_.next(place)) {
            return false;
        }
        work.place = place;
        work.end = rows_;
        work.group = 0;
        work.b_row = place.column;
        work.b_scale_row = place.column / kScaleTileRows;
        work.first_k = 0;
        work.stages = k_blocks_;
        work.waves = S::kWaves;
        return true;
    }
};

template <typename S, typename Element>
__device__ __forceinline__ void gemm(const Operand& a, const Operand& b,
                                     const TileResult<Element>& result, int32 k) {
    const int32 k_blocks = (k + kStageK - 1) / kStageK;
    const Tiles<S> tiles(result.rows, result.columns, k_blocks);
    multiply<S>(
        memory, a, b, tiles, k_blocks,
        [&](const TileWork& work, uint32 row, const float(&sums)[64], uint8* staged) ALWAYS_INLINE {
            store_wgmma_rows(result, work.place.row + row, work.place.column, sums, staged);
        });
}

// a [m, k] in boxes of the rows that a CTA copies, b [n, k] in boxes of 128 rows, both of 128
// columns and swizzled by 128 bytes; scales in boxes of a tile, bias [n] or null, out [m, n];
// `accumulate` adds to an FP32 result. `by_column`: each row of b has its own scales; otherwise 128
// x 128 elements share one.
#define MXFP8_GEMM(name, waves, across, by_column, Element)                                      \
    extern "C" __global__ void __cluster_dims__(across, 1, 1) __launch_bounds__(kThreads, 1)     \
        name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,    \
             const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,    \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate) {                                                       \
        gemm<TileShape<waves, across, by_column>>(                                               \
            Operand{a, a_scales}, Operand{b, b_scales},                                          \
            TileResult<Element>{out, bias, m, n, accumulate != 0}, k);                           \
    }

#define GEMMS(tile, waves, across)                                                               \
    MXFP8_GEMM(sm90_mxfp8_gemm_bf16_squares_##tile, waves, across, false, bf16)                  \
    MXFP8_GEMM(sm90_mxfp8_gemm_f32_squares_##tile, waves, across, false, float)                  \
    MXFP8_GEMM(sm90_mxfp8_gemm_bf16_rows_##tile, waves, across, true, bf16)                      \
    MXFP8_GEMM(sm90_mxfp8_gemm_f32_rows_##tile, waves, across, true, float)

GEMMS(128x128, 1, 1)
GEMMS(256x128, 2, 1)

// A cluster of two CTAs, side by side along N, that share rows of a.
GEMMS(128x128_1x2, 1, 2)
GEMMS(256x128_1x2, 2, 2)
