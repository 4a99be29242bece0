// Stores a 128 x 128 tile of accumulators from registers to the result in global memory: bias,
// rounding, accumulation, and rows in 16-byte vectors.
#pragma once

#include "common/types.cuh"

// A row-major result.
template <typename Element>
struct TileResult {
    Element* data;
    const Element* bias;  // [columns], or null; added in FP32 before rounding
    int32 rows;
    int32 columns;
    bool accumulate;  // add to the stored result; FP32 only
};

__device__ __forceinline__ void put_pair(bf16* target, float a, float b) {
    *reinterpret_cast<uint32*>(target) = to_bf16_pair(a, b);
}

__device__ __forceinline__ void put_pair(float* target, float a, float b) {
    *reinterpret_cast<float2*>(target) = make_float2(a, b);
}

__device__ __forceinline__ uint4 add_f32x4(uint4 a, uint4 b) {
    return make_uint4(__float_as_uint(__uint_as_float(a.x) + __uint_as_float(b.x)),
                      __float_as_uint(__uint_as_float(a.y) + __uint_as_float(b.y)),
                      __float_as_uint(__uint_as_float(a.z) + __uint_as_float(b.z)),
                      __float_as_uint(__uint_as_float(a.w) + __uint_as_float(b.w)));
}

// Bytes of a tile row in shared memory: padded so that the eight rows that a warp writes at a time
// begin in different banks.
template <typename Element>
constexpr int kStagedRowBytes = 128 * sizeof(Element) + (sizeof(Element) == 2 ? 16 : 32);

// Bytes of shared memory for store_tile.
template <typename Element>
constexpr int kStagedBytes = 128 * kStagedRowBytes<Element>;

// Called by all threads of the CTA. A warp's accumulators are [kM][kN] results of mma.sync, 16 x 8
// each, and begin at (warp_row, warp_column) of the tile; the tile begins at (row, column) of the
// result. No thread accesses `shared` (kStagedBytes) for another purpose any more.
template <typename Element, int kThreads, int kM, int kN>
__device__ __forceinline__ void store_tile(const TileResult<Element>& result, int32 row,
                                           int32 column, int32 warp_row, int32 warp_column,
                                           const float (&accumulators)[kM][kN][4],
                                           unsigned char* shared) {
    constexpr int kRowBytes = kStagedRowBytes<Element>;
    constexpr int kElements = 16 / sizeof(Element);
    constexpr int kChunks = 128 / kElements;  // per row
    const int32 lane = threadIdx.x % 32;

#pragma unroll
    for (int n = 0; n < kN; ++n) {
        const int32 at = warp_column + n * 8 + lane % 4 * 2;
        float bias[2] = {0.0f, 0.0f};
        if (result.bias != nullptr) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (column + at + i < result.columns) {
                    bias[i] = to_f32(result.bias[column + at + i]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32 staged_row = warp_row + m * 16 + half * 8 + lane / 4;
                auto* target = reinterpret_cast<Element*>(shared + staged_row * kRowBytes) + at;
                const float low = accumulators[m][n][2 * half];
                const float high = accumulators[m][n][2 * half + 1];
                if (result.bias != nullptr) {
                    put_pair(target, low + bias[0], high + bias[1]);
                } else {
                    put_pair(target, low, high);
                }
            }
        }
    }
    __syncthreads();

    const int32 rows = min(result.rows - row, 128);
    const int32 columns = min(result.columns - column, 128);
    Element* first = result.data + static_cast<int64>(row) * result.columns + column;
    if (result.columns % kElements == 0) {
#pragma unroll 4
        for (int32 i = threadIdx.x; i < 128 * kChunks; i += kThreads) {
            const int32 r = i / kChunks;
            const int32 c = i % kChunks;
            if (r < rows && c * kElements < columns) {
                uint4 value = *reinterpret_cast<const uint4*>(shared + r * kRowBytes + c * 16);
                auto* target = reinterpret_cast<uint4*>(
                    first + static_cast<int64>(r) * result.columns + c * kElements);
                if constexpr (sizeof(Element) == 4) {
                    if (result.accumulate) {
                        value = add_f32x4(*target, value);
                    }
                }
                *target = value;
            }
        }
    } else {
        for (int32 i = threadIdx.x; i < 128 * 128; i += kThreads) {
            const int32 r = i / 128;
            const int32 c = i % 128;
            if (r < rows && c < columns) {
                Element value = reinterpret_cast<const Element*>(shared + r * kRowBytes)[c];
                Element* target = first + static_cast<int64>(r) * result.columns + c;
                if constexpr (sizeof(Element) == 4) {
                    if (result.accumulate) {
                        value = *target + value;
                    }
                }
                *target = value;
            }
        }
    }
}
