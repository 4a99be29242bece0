// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands whose scales are for 128
// elements along K: E4M3, and E8M0 scales in tiles (layout/scale_tile.cuh). All three GEMMs of a
// linear layer have this form.
//
// Static persistent: a CTA computes tile after tile in an order that keeps operands in the L2
// cache. Warp specialized, see mma/sm90_mxfp8_tile.cuh. What lies outside of the operands reads as
// zeros. K is a multiple of 16, as tensor copies need, and nothing is empty. Sums run over K in
// ascending order whatever the grid.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_store_tile.cuh"
#include "mma/sm90_mxfp8_tile.cuh"
#include "ptx/elect.cuh"
#include "scheduler/persistent_tiles.cuh"

using namespace sm90_mxfp8;

extern __shared__ __align__(1024) uint8 memory[];

template <typename S, typename Element>
__device__ __forceinline__ void gemm(const Operand& a, const Operand& b,
                                     const TileResult<Element>& result, int32 k) {
    const Shared<S> shared(memory);
    // The same in all lanes, as the compiler shall know.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0 && elect_one()) {
        shared.init_barriers();
    }
    synchronize_all<S>();
    const PersistentTiles<S::kTileM, kTileN, S::kAcross> tiles(result.rows, result.columns);
    const int32 k_blocks = (k + kStageK - 1) / kStageK;

    if (warp < kWarpgroup / 32) {
        keep_registers<kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            copy_operands(shared, a, b, tiles, k_blocks);
        }
    } else {
        take_registers<kConsumerRegisters>();
        const uint32 consumer = warp / (kWarpgroup / 32) - 1;
        uint8* staged = shared.staged + (warp - kWarpgroup / 32) * kStagedWarpBytes;
        multiply(shared, consumer, tiles, k_blocks,
                 [&](int32 row, int32 column, const float(&sums)[64]) {
                     store_wgmma_rows(result, row, column, sums, staged);
                 });
    }
    // No CTA ends while others of its cluster copy to it or arrive at its barriers.
    if constexpr (S::kAcross > 1) {
        // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
        __syncwarp();
        synchronize_all<S>();
    }
}

// a [m, k] in boxes of the rows that a CTA copies, b [n, k] in boxes of 128 rows, both of 128
// columns and swizzled by 128 bytes; their scales in boxes of a tile, bias [n] or null, out [m, n];
// `accumulate` adds to what is in an FP32 result. `by_column`: rows of b have scales of their own;
// otherwise 128 x 128 elements share one.
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

// Two CTAs side by side that share rows of a.
GEMMS(128x128_1x2, 1, 2)
GEMMS(256x128_1x2, 2, 2)
