// Rounds the elements of an NVFP4 operand stochastically: each scaled value goes to one of the two
// neighboring E2M1 numbers, with the value as expectation. Random words are those of Philox at the
// element's index in the operand, with a seed and a step in device memory. Computes the block
// scales again, from the largest magnitude of the tensor, but does not store them: a quantization
// has stored the same.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_tile.cuh"

template <typename E, bool kColumn>
__device__ __forceinline__ void round(const E* __restrict__ x, const float* __restrict__ amax,
                                      const uint64* __restrict__ key, uint8* __restrict__ data,
                                      uint32 rows, uint32 columns, uint32 flags, uint64 stream,
                                      uint64 first, uint64 stride) {
    extern __shared__ uint4 dynamic[];
    __shared__ Fp4Shared shared;
    E* const tile = reinterpret_cast<E*>(dynamic);
    const uint32 across = (columns + kFp4Tile - 1) / kFp4Tile;
    const uint32 tiles = (rows + kFp4Tile - 1) / kFp4Tile * across;
    if (blockIdx.x >= tiles) {
        return;
    }
    const Fp4Constants constants = fp4_constants(*amax, flags);
    const uint32 row0 = blockIdx.x / across * kFp4Tile;
    const uint32 column0 = blockIdx.x % across * kFp4Tile;
    const uint32 outer0 = kColumn ? column0 : row0, first0 = kColumn ? row0 : column0;
    const Fp4Words words = {key[0], stream | (key[1] & 0xffffffffu), first, stride};
    const Fp4Operand to = {data, nullptr, kColumn ? columns : rows, kColumn ? rows : columns};
    fp4_load_tile(x, rows, columns, row0, column0, tile);
    __syncthreads();
    MxCounters counters;
    fp4_quantize_tile<E, kColumn, Fp4Rounding::kStochastic>(tile, to, outer0, first0, constants,
                                                            words, shared, counters);
    __syncthreads();
    fp4_store_tile<false>(to, outer0, first0, shared);
}

// x [rows, columns], 16-byte aligned; amax [1]; key [2]: seed and step; data [rows, columns]
// packed, or [columns, rows]; flags of `layout/nvfp4_block.cuh`; `first` is the index of the word
// of the operand's first element, and `stride` words lie between its rows. One CTA per tile.
#define STOCHASTIC_ROUND_KERNEL(name, E, column)                                                 \
    extern "C" __global__ void __launch_bounds__(kFp4Threads)                                    \
        name(const E* __restrict__ x, const float* __restrict__ amax,                            \
             const uint64* __restrict__ key, uint8* __restrict__ data, uint32 rows,              \
             uint32 columns, uint32 flags, uint64 stream, uint64 first, uint64 stride) {         \
        round<E, column>(x, amax, key, data, rows, columns, flags, stream, first, stride);       \
    }

STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_bf16_row, bf16, false)
STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_bf16_column, bf16, true)
STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_f32_row, float, false)
STOCHASTIC_ROUND_KERNEL(stochastic_round_nvfp4_f32_column, float, true)
