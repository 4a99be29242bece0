// Results of gradients of attention on tcgen05: a thread has a row of sums in tensor memory.
#pragma once

#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy_4d.cuh"

namespace sm100_attention_backward {

// 32 rows of a warp: chunks of 64 columns in rows of 128 bytes, in the swizzle of TMA.
template <int kHeadDim>
using WarpRows = WgmmaRows<32, kHeadDim>;

// Writes the calling warp's 32 rows of sums at `address` times `scale`, as BF16, to shared memory:
// this thread's row to row `row`.
template <int kHeadDim>
__device__ __forceinline__ void stage_sums(uint8* staged, uint32 address, float scale,
                                           uint32 row) {
    constexpr int kAtOnce = 32;
#pragma unroll
    for (int column = 0; column < kHeadDim; column += kAtOnce) {
        uint32 words[kAtOnce];
        tcgen05_load_32_columns(words, address + column);
        tcgen05_wait_load();
#pragma unroll
        for (int unit = 0; unit < kAtOnce / 8; ++unit) {
            uint32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                packed[i] = to_bf16_pair(__uint_as_float(words[8 * unit + 2 * i]) * scale,
                                         __uint_as_float(words[8 * unit + 2 * i + 1]) * scale);
            }
            *reinterpret_cast<uint4*>(staged +
                                      WarpRows<kHeadDim>::offset(row, column / 8 + unit)) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
    // A copy reads also the columns beyond the head, but does not store them.
#pragma unroll
    for (int unit = kHeadDim / 8; unit < WarpRows<kHeadDim>::kChunks * 8; ++unit) {
        *reinterpret_cast<uint4*>(staged + WarpRows<kHeadDim>::offset(row, unit)) =
            make_uint4(0, 0, 0, 0);
    }
}

// Stores staged rows by TMA, by one thread: 32 rows of a head from `row` on.
template <int kHeadDim>
__device__ __forceinline__ void store_rows(const TensorMap& map, const uint8* staged, int32 row,
                                           uint32 head, uint32 batch) {
    using Rows = WarpRows<kHeadDim>;
#pragma unroll
    for (uint32 chunk = 0; chunk < Rows::kChunks; ++chunk) {
        const TensorPlace place{{chunk * kChunkColumns, head, static_cast<uint32>(row), batch}};
        tensor_store_4d(map, place, staged + chunk * Rows::kChunkBytes);
    }
    tensor_store_commit();
}

}  // namespace sm100_attention_backward
