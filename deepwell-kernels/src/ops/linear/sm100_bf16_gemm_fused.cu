// BF16 GEMMs as in sm100_bf16_gemm.cu, fprop and dgrad, with a fused epilogue: GELU or its
// backward, and block quantization of the result along rows, down columns, or both, with its
// counters. See epilogue/fused_tensor_tile.cuh.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/fused_tensor_tile.cuh"
#include "epilogue/sm100_bf16_gemm.cuh"

using namespace sm100_bf16;

extern __shared__ __align__(1024) uint8 memory[];

// Operands as in sm100_bf16_gemm.cu.
#define BF16_GEMM_FUSED(name, ctas, tile_n, b_k_major)                                           \
    extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(kThreads, 1)       \
        name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,           \
             FUSED_ARGUMENTS) {                                                                  \
        using S = Shape<ctas, tile_n, 1, 1, true, b_k_major>;                                    \
        const FusedResult result = FUSED_RESULT;                                                 \
        MxCounters counters;                                                                     \
        bf16_gemm<S>(                                                                            \
            a, b, m, n, k, memory,                                                               \
            [&](const Shared<S>& shared, uint32 tensor_base, auto tiles) {                       \
                store_fused_tiles(shared, tensor_base, tiles, result, counters);                 \
            });                                                                                  \
        write_fused_statistics(result, counters, totals, statistics);                            \
    }

#define FUSED_GEMMS(tile, ctas, tile_n)                                                        \
    BF16_GEMM_FUSED(sm100_bf16_gemm_fused_linear_##tile, ctas, tile_n, true)                   \
    BF16_GEMM_FUSED(sm100_bf16_gemm_fused_dgrad_##tile, ctas, tile_n, false)

FUSED_GEMMS(128x128, 1, 128)
FUSED_GEMMS(128x256, 1, 256)
FUSED_GEMMS(256x128, 2, 128)
FUSED_GEMMS(256x256, 2, 256)
