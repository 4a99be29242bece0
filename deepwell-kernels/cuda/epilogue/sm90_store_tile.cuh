// From sums of wgmma in registers to the result in device memory: bias, rounding, accumulation.
//
// Each warp has 16 rows of some columns. They pass in subtiles of 128 bytes of a row through 2 KiB
// of shared memory, so that a warp writes four whole rows of one at a time.
#pragma once

#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/reduce.cuh"

// Puts a warp's values of a subtile into its staged rows: the 16-byte units of a row are exchanged
// by its number modulo eight.
__device__ __forceinline__ void stage_subtile(bf16*, uint8* staged, const float (&values)[32]) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 row = shared_address(staged) + lane % 16 * 128;
#pragma unroll
    for (uint32 eight = 0; eight < 8; eight += 2) {
        const float* of = values + eight * 4;
        stmatrix_x4(row + ((eight + lane / 16) ^ lane % 8) * 16, to_bf16_pair(of[0], of[1]),
                    to_bf16_pair(of[2], of[3]), to_bf16_pair(of[4], of[5]),
                    to_bf16_pair(of[6], of[7]));
    }
}

__device__ __forceinline__ void stage_subtile(float*, uint8* staged, const float (&values)[16]) {
    const uint32 lane = threadIdx.x % 32;
#pragma unroll
    for (uint32 eight = 0; eight < 4; ++eight) {
#pragma unroll
        for (uint32 half = 0; half < 2; ++half) {
            const uint32 row = half * 8 + lane / 4;
            const uint32 unit = (eight * 2 + lane % 4 / 2) ^ (row & 7);
            uint8* target = staged + row * 128 + unit * 16 + lane % 2 * 8;
            const float* pair = values + eight * 4 + half * 2;
            *reinterpret_cast<float2*>(target) = make_float2(pair[0], pair[1]);
        }
    }
}

// Writes a subtile of 16 rows from (row, column) on; `staged` holds them with the 16-byte units of
// a row exchanged by its number modulo eight.
template <typename Element>
__device__ __forceinline__ void write_staged(const TileResult<Element>& result, int32 row,
                                             int32 column, const uint8* staged) {
    constexpr int kElements = 16 / sizeof(Element);
    const int32 lane = threadIdx.x % 32;
    Element* first = result.data + static_cast<int64>(row) * result.columns + column;
    if (result.columns % kElements == 0) {
        const int32 unit = lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int32 r = i * 4 + lane / 8;
            if (row + r < result.rows && column + unit * kElements < result.columns) {
                const uint4 value =
                    *reinterpret_cast<const uint4*>(staged + r * 128 + (unit ^ (r & 7)) * 16);
                auto* target = reinterpret_cast<uint4*>(
                    first + static_cast<int64>(r) * result.columns + unit * kElements);
                if constexpr (sizeof(Element) == 4) {
                    if (result.accumulate) {
                        add_to_f32x4(reinterpret_cast<float*>(target),
                                     *reinterpret_cast<const float4*>(&value));
                        continue;
                    }
                }
                *target = value;
            }
        }
    } else {
        constexpr int kSubtileColumns = 128 / sizeof(Element);
        for (int32 i = lane; i < 16 * kSubtileColumns; i += 32) {
            const int32 r = i / kSubtileColumns;
            const int32 c = i % kSubtileColumns;
            if (row + r < result.rows && column + c < result.columns) {
                const uint8* unit = staged + r * 128 + ((c / kElements) ^ (r & 7)) * 16;
                Element value = reinterpret_cast<const Element*>(unit)[c % kElements];
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

// The bias of column `column`, zero beyond the result.
template <typename Element>
__device__ __forceinline__ float bias_of(const TileResult<Element>& result, int32 column) {
    return column < result.columns ? to_f32(result.bias[column]) : 0.0f;
}

// The calling warp's 16 rows, from (row, column) of the result on, of twice as many columns as
// there are values; `sums` as ptx/wgmma.cuh has them. `staged` has 2 KiB for this warp alone.
template <typename Element, int kValues>
__device__ __forceinline__ void store_wgmma_rows(const TileResult<Element>& result, int32 row,
                                                 int32 column, const float (&sums)[kValues],
                                                 uint8* staged) {
    constexpr int kSubtileColumns = 128 / sizeof(Element);
    constexpr int kSubtileValues = kSubtileColumns / 2;
    const bool has_bias = result.bias != nullptr;
#pragma unroll
    for (int subtile = 0; subtile < kValues / kSubtileValues; ++subtile) {
        float values[kSubtileValues];
#pragma unroll
        for (int i = 0; i < kSubtileValues; ++i) {
            values[i] = sums[subtile * kSubtileValues + i];
        }
        if (has_bias) {
#pragma unroll
            for (int i = 0; i < kSubtileValues; ++i) {
                const int32 at = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
                values[i] += bias_of(result, column + subtile * kSubtileColumns + at);
            }
        }
        // redundant bar.warp.sync: before the first wave, the turns along K ordered all lanes
        __syncwarp();
        stage_subtile(static_cast<Element*>(nullptr), staged, values);
        __syncwarp();
        write_staged(result, row, column + subtile * kSubtileColumns, staged);
    }
}
