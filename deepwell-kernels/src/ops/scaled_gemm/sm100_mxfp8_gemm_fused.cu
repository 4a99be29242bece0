// MXFP8 GEMMs as in sm100_mxfp8_gemm.cu, with BF16 results and a fused epilogue: GELU or its
// backward, and block quantization of the result along rows, down columns, or both, with its
// counters. See epilogue/fused_tensor_tile.cuh.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/fused_tensor_tile.cuh"
#include "epilogue/sm100_scaled_gemm.cuh"
#include "mma/sm100_mxfp8_tile.cuh"

using namespace sm100_mxfp8;

extern __shared__ __align__(1024) uint8 memory[];

// Operands as in sm100_mxfp8_gemm.cu.
#define MXFP8_GEMM_FUSED(tile, ctas, tile_n)                                                     \
    extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(kThreads, 1)       \
        sm100_mxfp8_gemm_fused_##tile(                                                           \
            const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,     \
            const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,     \
            FUSED_ARGUMENTS) {                                                                   \
        using S = Shape<ctas, tile_n>;                                                           \
        const FusedResult result = FUSED_RESULT;                                                 \
        MxCounters counters;                                                                     \
        scaled_gemm<S>(                                                                           \
            Operand{a, a_scales, m}, Operand{b, b_scales, n}, k, memory,                         \
            [&](const Shared<S>& shared, uint32 tensor_base, auto tiles) {                       \
                store_fused_tiles(shared, tensor_base, tiles, result, counters);                 \
            });                                                                                  \
        write_fused_statistics(result, counters, totals, statistics);                            \
    }

MXFP8_GEMM_FUSED(128x128, 1, 128)
MXFP8_GEMM_FUSED(128x256, 1, 256)
MXFP8_GEMM_FUSED(256x128, 2, 128)
MXFP8_GEMM_FUSED(256x256, 2, 256)
