// Block quantization of a matrix to NVFP4, rounded to nearest: data, scales and tensor scale along
// rows, down columns (stored transposed), or both from one read of the source, and counters of
// underflows, saturations and other events. The largest magnitude of the tensor is known.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_tile.cuh"

struct Planes {
    uint8* data;
    uint8* scales;
    float* tensor_scale;
};

template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize(const E* __restrict__ x, const float* __restrict__ amax,
                                         const Planes& by_row, const Planes& by_column,
                                         uint32 rows, uint32 columns, uint32 flags,
                                         MxTotals* totals, uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ Fp4Shared shared;
    __shared__ MxTallyShared of_tally;
    E* const tile = reinterpret_cast<E*>(dynamic);
    const Fp4Constants constants = fp4_constants(*amax, flags);
    const uint32 across = (columns + kFp4Tile - 1) / kFp4Tile;
    const uint32 tiles = (rows + kFp4Tile - 1) / kFp4Tile * across;
    MxTally tally(of_tally, totals);
    MxCounters counters;
    if (blockIdx.x < tiles) {
        const uint32 row0 = blockIdx.x / across * kFp4Tile;
        const uint32 column0 = blockIdx.x % across * kFp4Tile;
        fp4_load_tile(x, rows, columns, row0, column0, tile);
        __syncthreads();
        if constexpr (kRow) {
            const Fp4Operand to = {by_row.data, by_row.scales, rows, columns};
            fp4_quantize_tile<E, false, Fp4Rounding::kNearest>(tile, to, row0, column0, constants,
                                                               Fp4Words{}, shared, counters);
            __syncthreads();
            fp4_store_tile<true>(to, row0, column0, shared);
        }
        if constexpr (kColumn) {
            if constexpr (kRow) {
                __syncthreads();
            }
            const Fp4Operand to = {by_column.data, by_column.scales, columns, rows};
            fp4_quantize_tile<E, true, Fp4Rounding::kNearest>(tile, to, column0, row0, constants,
                                                              Fp4Words{}, shared, counters);
            __syncthreads();
            fp4_store_tile<true>(to, column0, row0, shared);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if constexpr (kRow) {
            *by_row.tensor_scale = constants.decode_scale;
        }
        if constexpr (kColumn) {
            *by_column.tensor_scale = constants.decode_scale;
        }
    }
    tally.leave(counters);
    __syncthreads();
    tally.give();
    const uint64 operands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    tally.finish(gridDim.x, operands * rows * columns, statistics);
}

// x [rows, columns], 16-byte aligned; amax [1]; planes of an operand that is not asked for are
// null; flags of `layout/nvfp4_block.cuh`; statistics [6]. One CTA per tile, at least one.
#define QUANTIZE_KERNEL(name, E, row, column)                                                    \
    extern "C" __global__ void __launch_bounds__(kFp4Threads)                                    \
        name(const E* __restrict__ x, const float* __restrict__ amax, uint8* __restrict__ data,  \
             uint8* __restrict__ scales, float* __restrict__ tensor_scale,                       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t,                           \
             float* __restrict__ tensor_scale_t, uint32 rows, uint32 columns, uint32 flags,      \
             MxTotals* totals, uint64* statistics) {                                             \
        quantize<E, row, column>(x, amax, Planes{data, scales, tensor_scale},                    \
                                 Planes{data_t, scales_t, tensor_scale_t}, rows, columns, flags, \
                                 totals, statistics);                                            \
    }

QUANTIZE_KERNEL(quantize_nvfp4_bf16_row, bf16, true, false)
QUANTIZE_KERNEL(quantize_nvfp4_bf16_column, bf16, false, true)
QUANTIZE_KERNEL(quantize_nvfp4_bf16_both, bf16, true, true)
QUANTIZE_KERNEL(quantize_nvfp4_f32_row, float, true, false)
QUANTIZE_KERNEL(quantize_nvfp4_f32_column, float, false, true)
QUANTIZE_KERNEL(quantize_nvfp4_f32_both, float, true, true)
