// Block quantization to NVFP4 with a tensor scale for each part of a tensor
// (layout/nvfp4_groups.cuh), rounded to nearest: along rows, down columns (stored transposed), or
// both from one read of the source. Counters are those of the parts. The largest magnitudes are
// known. Rows after all groups become zeros.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_groups.cuh"

struct Planes {
    uint8* data;
    uint8* scales;
    float* tensor_scales;  // [parts]
};

template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize(const E* __restrict__ x,
                                         const float* __restrict__ amaxes, const Fp4Parts& parts,
                                         const Planes& by_row, const Planes& by_column,
                                         uint32 flags, MxTotals* totals, uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ Fp4Shared shared;
    __shared__ MxTallyShared of_tally;
    E* const tile = reinterpret_cast<E*>(dynamic);
    const Fp4Place place(parts);
    const Fp4Constants constants = place.constants(parts, amaxes, flags);
    const uint32 row0 = place.row0, column0 = place.column0;
    MxTally tally(of_tally, totals);
    MxCounters counters;
    if (place.exists) {
        place.load(parts, x, tile);
        __syncthreads();
        if constexpr (kRow) {
            const Fp4Operand to = fp4_operand_of(by_row.data, by_row.scales, place.matrix,
                                                 parts.rows, parts.columns);
            fp4_quantize_tile<E, false, Fp4Rounding::kNearest>(tile, to, row0, column0, constants,
                                                               Fp4Words{}, shared, counters);
            __syncthreads();
            fp4_store_tile<true>(to, row0, column0, shared);
        }
        if constexpr (kColumn) {
            if constexpr (kRow) {
                __syncthreads();
            }
            const Fp4Operand to = fp4_operand_of(by_column.data, by_column.scales, place.matrix,
                                                 parts.columns, parts.rows);
            fp4_quantize_tile<E, true, Fp4Rounding::kNearest>(tile, to, column0, row0, constants,
                                                              Fp4Words{}, shared, counters);
            __syncthreads();
            fp4_store_tile<true>(to, column0, row0, shared);
        }
    }
    if (blockIdx.x == 0) {
        for (uint32 part = threadIdx.x; part < parts.parts; part += kFp4Threads) {
            const float decode_scale = fp4_constants(amaxes[part], flags).decode_scale;
            if constexpr (kRow) {
                by_row.tensor_scales[part] = decode_scale;
            }
            if constexpr (kColumn) {
                by_column.tensor_scales[part] = decode_scale;
            }
        }
    }
    tally.leave(counters);
    __syncthreads();
    tally.give();
    const uint64 operands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    tally.finish(gridDim.x, operands * parts.owned_rows() * parts.columns, statistics);
}

// x, 16-byte aligned: [rows, columns] with offsets [parts + 1], or [parts, rows, columns] without;
// amaxes [parts]; planes of an operand that is not asked for are null; flags of
// `layout/nvfp4_block.cuh`; statistics [6]. One CTA per tile, at least one.
#define QUANTIZE_KERNEL(name, E, row, column)                                                    \
    extern "C" __global__ void __launch_bounds__(kFp4Threads)                                    \
        name(const E* __restrict__ x, const float* __restrict__ amaxes,                          \
             const int32* __restrict__ offsets, uint32 parts, uint8* __restrict__ data,          \
             uint8* __restrict__ scales, float* __restrict__ tensor_scales,                      \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t,                           \
             float* __restrict__ tensor_scales_t, uint32 rows, uint32 columns, uint32 flags,     \
             MxTotals* totals, uint64* statistics) {                                             \
        quantize<E, row, column>(x, amaxes, Fp4Parts{offsets, parts, rows, columns},             \
                                 Planes{data, scales, tensor_scales},                            \
                                 Planes{data_t, scales_t, tensor_scales_t}, flags, totals,       \
                                 statistics);                                                    \
    }

QUANTIZE_KERNEL(quantize_nvfp4_groups_bf16_row, bf16, true, false)
QUANTIZE_KERNEL(quantize_nvfp4_groups_bf16_column, bf16, false, true)
QUANTIZE_KERNEL(quantize_nvfp4_groups_bf16_both, bf16, true, true)
QUANTIZE_KERNEL(quantize_nvfp4_groups_f32_row, float, true, false)
QUANTIZE_KERNEL(quantize_nvfp4_groups_f32_column, float, false, true)
QUANTIZE_KERNEL(quantize_nvfp4_groups_f32_both, float, true, true)
