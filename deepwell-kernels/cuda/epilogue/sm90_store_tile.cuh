// Stores wgmma accumulators from registers to the result in global memory: bias, rounding,
// accumulation.
//
// Each warp has 16 rows of 128 or 256 columns. They pass through 2 KiB of shared memory in subtiles
// of 128 bytes per row, so that a warp stores four whole subtile rows at a time.
#pragma once

#include "common/types.cuh"
#include "epilogue/store_tile.cuh"

// Position of 16-byte unit `unit` in a staged row. Two units of each of four rows, and one unit of
// each of eight rows, lie in different banks: the write patterns of a warp for FP32 and for BF16.
__device__ __forceinline__ uint32 staged_unit(uint32 row, uint32 unit) {
    return unit ^ (row % 4 * 2 + row / 4 % 2);
}

// Writes a lane's pair of columns, `column` and the next, to its staged row.
template <typename Element>
__device__ __forceinline__ void stage_pair(uint8* staged, uint32 row, uint32 column, float low,
                                           float high) {
    const uint32 at = column * sizeof(Element);
    uint8* target = staged + row * 128 + staged_unit(row, at / 16) * 16 + at % 16;
    put_pair(reinterpret_cast<Element*>(target), low, high);
}

// Stores a subtile of 16 rows from (row, column) on; the 16-byte units of a row in `staged` are at
// the positions of `staged_unit`.
template <typename Element>
__device__ __forceinline__ void write_staged(const TileResult<Element>& result, int32 row,
                                             int32 column, const uint8* staged) {
    constexpr int kElements = 16 / sizeof(Element);
    const int32 lane = threadIdx.x % 32;
    Element* first = result.data + static_cast<int64>(row) * result.columns + column;
    if (result.columns % kElements == 0) {
        const int32 unit = lane % 8;
        const auto exists = [&](int i) {
            return row + i * 4 + lane / 8 < result.rows &&
                   column + unit * kElements < result.columns;
        };
        const auto place = [&](int i) {
            return reinterpret_cast<uint4*>(
                first + static_cast<int64>(i * 4 + lane / 8) * result.columns + unit * kElements);
        };
        // When accumulating, loads two old values at a time: a single load would wait for memory
        // after each store, and four do not fit in registers.
#pragma unroll
        for (int pair = 0; pair < 4; pair += 2) {
            uint4 before[2];
            if constexpr (sizeof(Element) == 4) {
                if (result.accumulate) {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        before[i] =
                            exists(pair + i) ? *place(pair + i) : make_uint4(0, 0, 0, 0);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 r = (pair + i) * 4 + lane / 8;
                if (exists(pair + i)) {
                    uint4 value = *reinterpret_cast<const uint4*>(staged + r * 128 +
                                                                  staged_unit(r, unit) * 16);
                    if constexpr (sizeof(Element) == 4) {
                        if (result.accumulate) {
                            value = add_f32x4(before[i], value);
                        }
                    }
                    *place(pair + i) = value;
                }
            }
        }
    } else {
        constexpr int kSubtileColumns = 128 / sizeof(Element);
        for (int32 i = lane; i < 16 * kSubtileColumns; i += 32) {
            const int32 r = i / kSubtileColumns;
            const int32 c = i % kSubtileColumns;
            if (row + r < result.rows && column + c < result.columns) {
                const uint8* unit = staged + r * 128 + staged_unit(r, c / kElements) * 16;
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

// Returns the bias of column `column`, or zero.
template <typename Element>
__device__ __forceinline__ float bias_of(const TileResult<Element>& result, int32 column) {
    return result.bias != nullptr && column < result.columns ? to_f32(result.bias[column]) : 0.0f;
}

// Stores the calling warp's 16 rows, from (row, column) of the result on; `sums` in the layout of
// ptx/wgmma.cuh, to be multiplied by `factor`. `staged` has 2 KiB for this warp alone.
template <typename Element, int kSums>
__device__ __forceinline__ void store_wgmma_rows(const TileResult<Element>& result, int32 row,
                                                 int32 column, const float (&sums)[kSums],
                                                 uint8* staged, float factor = 1.0f) {
    constexpr int kSubtileColumns = 128 / sizeof(Element);  // columns
    const uint32 lane = threadIdx.x % 32;
#pragma unroll
    for (int subtile = 0; subtile < 2 * kSums / kSubtileColumns; ++subtile) {
        // redundant bar.warp.sync: before the first wave, turns or waits along K ordered all lanes
        __syncwarp();
#pragma unroll
        for (int eight = 0; eight < kSubtileColumns / 8; ++eight) {
            const uint32 at = eight * 8 + lane % 4 * 2;
            const int32 first = column + subtile * kSubtileColumns + at;
            const float bias[2] = {bias_of(result, first), bias_of(result, first + 1)};
            const float* values = sums + (subtile * kSubtileColumns / 8 + eight) * 4;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                stage_pair<Element>(staged, half * 8 + lane / 4, at,
                                    values[half * 2] * factor + bias[0],
                                    values[half * 2 + 1] * factor + bias[1]);
            }
        }
        __syncwarp();
        write_staged(result, row, column + subtile * kSubtileColumns, staged);
    }
}
