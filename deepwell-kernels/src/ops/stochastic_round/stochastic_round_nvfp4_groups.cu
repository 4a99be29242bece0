// Rounds the elements of an NVFP4 operand stochastically, as stochastic_round_nvfp4.cu does, where
// groups of rows have a tensor scale each (layout/nvfp4_groups.cuh). An element has the random word
// of its index in the whole operand. Rows after all groups become zeros.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_groups.cuh"

template <typename E, bool kColumn>
__device__ __forceinline__ void round(const E* __restrict__ x, const float* __restrict__ amaxes,
                                      const Fp4Parts& parts, const uint64* __restrict__ key,
                                      uint8* __restrict__ data, uint32 flags, uint64 stream) {
    extern __shared__ uint4 dynamic[];
    __shared__ Fp4Shared shared;
    E* const tile = reinterpret_cast<E*>(dynamic);
    const Fp4Place place(parts);
    if (!place.exists) {
        return;
    }
    const Fp4Constants constants = place.constants(parts, amaxes, flags);
    const uint32 rows = parts.rows, columns = parts.columns;
    const uint32 outer0 = kColumn ? place.column0 : place.row0;
    const uint32 first0 = kColumn ? place.row0 : place.column0;
    const Fp4Operand to = {data, nullptr, kColumn ? columns : rows, kColumn ? rows : columns};
    const Fp4Words words = {key[0], stream | (key[1] & 0xffffffffu), 0, to.k};
    place.load(parts, x, tile);
    __syncthreads();
    MxCounters counters;
    fp4_quantize_tile<E, kColumn, Fp4Rounding::kStochastic>(tile, to, outer0, first0, constants,
                                                            words, shared, counters);
    __syncthreads();
    fp4_store_tile<false>(to, outer0, first0, shared);
}

// x [rows, columns], 16-byte aligned; amaxes [parts]; offsets [parts + 1]; key [2]: seed and step;
// data [rows, columns] packed, or [columns, rows]; flags of `layout/nvfp4_block.cuh`. One CTA per
// tile.
#define STOCHASTIC_ROUND_KERNEL(name, E, column)                                                 \
    extern "C" __global__ void __launch_bounds__(kFp4Threads)                                    \
        name(const E* __restrict__ x, const float* __restrict__ amaxes,                          \
             const int32* __restrict__ offsets, uint32 parts, const uint64* __restrict__ key,    \
             uint8* __restrict__ data, uint32 rows, uint32 columns, uint32 flags,                \
             uint64 stream) {                                                                    \
        round<E, column>(x, amaxes, Fp4Parts{offsets, parts, rows, columns}, key, data, flags,   \
                         stream);                                                                \
    }

STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_groups_bf16_row, bf16, false)
STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_groups_bf16_column, bf16, true)
STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_groups_f32_row, float, false)
STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_groups_f32_column, float, true)
