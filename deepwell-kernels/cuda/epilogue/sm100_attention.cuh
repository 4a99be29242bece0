// Corrections and results of attention on tcgen05. A thread of a correction warp has a row of sums
// in tensor memory.
#pragma once

#include "common/types.cuh"
#include "mma/sm100_attention_tile.cuh"
#include "ptx/f32x2.cuh"
#include "ptx/special_register.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy_4d.cuh"

namespace sm100_attention {

constexpr int kColumnsAtOnce = 32;

// Multiplies two values in registers of tensor memory.
__device__ __forceinline__ void scale_pair(uint32& first, uint32& second, FloatPair factor) {
    float low, high;
    unpack(multiply(pair_of(__uint_as_float(first), __uint_as_float(second)), factor), low, high);
    first = __float_as_uint(low);
    second = __float_as_uint(high);
}

// Multiplies the sums of the calling warp's rows, beginning at `address`, by each row's factor.
template <typename S>
__device__ __forceinline__ void scale_sums(uint32 address, float factor) {
    const FloatPair factors = pair_of(factor, factor);
#pragma unroll
    for (int column = 0; column < S::kHeadDim; column += kColumnsAtOnce) {
        uint32 words[kColumnsAtOnce];
        tcgen05_load_32_columns(words, address + column);
        tcgen05_wait_load();
#pragma unroll
        for (int i = 0; i < kColumnsAtOnce; i += 2) {
            scale_pair(words[i], words[i + 1], factors);
        }
        tcgen05_store_32_columns(address + column, words);
    }
    tcgen05_wait_store();
}

// Writes the calling warp's 32 rows of sums times factors, as BF16, to `staged` in shared memory:
// chunks of 64 columns in rows of 128 bytes, in the swizzle of TMA.
template <typename S>
__device__ __forceinline__ void stage_results(uint8* staged, uint32 address, float factor) {
    constexpr uint32 kChunkBytes = 32 * kChunkRowBytes;
    // Recomputed at each call: there are no registers to keep the addresses of units.
    const uint32 lane = thread_index_again() % 32;
    const FloatPair factors = pair_of(factor, factor);
#pragma unroll
    for (int column = 0; column < S::kHeadDim; column += kColumnsAtOnce) {
        uint32 words[kColumnsAtOnce];
        tcgen05_load_32_columns(words, address + column);
        tcgen05_wait_load();
        uint8* row = staged + column / kChunkColumns * kChunkBytes + lane * kChunkRowBytes;
#pragma unroll
        for (int unit = 0; unit < kColumnsAtOnce / 8; ++unit) {
            uint32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint32 first = words[8 * unit + 2 * i];
                uint32 second = words[8 * unit + 2 * i + 1];
                scale_pair(first, second, factors);
                packed[i] = to_bf16_pair(__uint_as_float(first), __uint_as_float(second));
            }
            const uint32 in_row = column % kChunkColumns / 8 + unit;
            *reinterpret_cast<uint4*>(row + (in_row ^ lane % 8) * 16) =
                make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

// Writes zeros to the staged columns beyond a head, which a copy reads, too, but does not store.
template <typename S>
__device__ __forceinline__ void clear_beyond_head(uint8* staged) {
    const uint32 lane = thread_index_again() % 32;
#pragma unroll
    for (uint32 unit = S::kHeadDim / 8; unit < S::Rows::kChunks * 8; ++unit) {
        uint8* row = staged + unit / 8 * 32 * kChunkRowBytes + lane * kChunkRowBytes;
        *reinterpret_cast<uint4*>(row + (unit % 8 ^ lane % 8) * 16) = make_uint4(0, 0, 0, 0);
    }
}

// Stores staged rows by TMA, by one thread: rows from `query` on of a head.
template <typename S>
__device__ __forceinline__ void store_results(const TensorMap& out, const uint8* staged,
                                              uint32 query, uint32 head, uint32 batch) {
#pragma unroll
    for (uint32 chunk = 0; chunk < S::Rows::kChunks; ++chunk) {
        const TensorPlace target{{chunk * kChunkColumns, head, query, batch}};
        tensor_store_4d(out, target, staged + chunk * 32 * kChunkRowBytes);
    }
    tensor_store_commit();
}

}  // namespace sm100_attention
