// Block quantization of a tile of 128 x 128 elements in shared memory: rowwise data and scales,
// columnwise data (stored transposed) and scales, counters.
//
// Each thread stores eight vectors of 16 bytes in shared memory, 16 rows apart, and reads them back
// one by one for the rowwise operand: a row block is 4 (BF16) or 8 (FP32) neighbouring threads, so
// shuffles compute its amax. For the columnwise operand a thread reads 32 rows of one word of
// columns, that is, one column block (or two). Its data goes back through the same shared memory,
// so that the transposed operand is written in whole lines of 128 bytes:
//
//   stage[column][chunk ^ swizzle(column)]: 16 elements (rows 16 * chunk ...) of one column, where
//   swizzle counts words of columns modulo 8. Eight threads write the same chunk of eight words of
//   columns, or read eight chunks of one column: both are free of bank conflicts.
//
// Elements beyond the edges of the matrix are zeros, which affect neither scales nor counters.
//
// BF16 matrices of whole tiles use `layout/mx_plain_tile.cuh` instead. This code is bound by
// integer instructions, so each rare case (a scale that is not a normal number, an underflow, a
// non-finite element) costs one comparison, and more only if it occurs.
#pragma once

#include "common/opaque.cuh"
#include "common/types.cuh"
#include "layout/mx_element.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_scale.cuh"

// Stores the first `count` bytes of a vector of quantized data.
__device__ __forceinline__ void mx_store_bytes(uint8* to, const uint32* words, int word_count,
                                               uint32 count) {
#pragma unroll
    for (int i = 0; i < 4 * word_count; ++i) {
        if (i < count) {
            to[i] = static_cast<uint8>(words[i / 4] >> (8 * (i % 4)));
        }
    }
}

// Computes the amax of each square (of the whole tile, if wide) into `shared.square_amax`.
template <typename E>
__device__ __forceinline__ void mx_square_amax(const uint4* __restrict__ own, bool wide,
                                               MxShared& shared) {
    using Tile = MxTile<E>;
    if (threadIdx.x < kMxGroups * kMxGroups) {
        shared.square_amax[threadIdx.x] = 0;
    }
    __syncthreads();
#pragma unroll 1
    for (int group = 0; group < kMxGroups; ++group) {
        uint32 amax = max(mx_magnitude<E>(own[2 * group * Tile::kThreads]),
                          mx_magnitude<E>(own[(2 * group + 1) * Tile::kThreads]));
#pragma unroll
        for (int lanes = 1; lanes < Tile::kBlockLanes; lanes *= 2) {
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
        }
        if (threadIdx.x % Tile::kBlockLanes == 0) {
            const uint32 across = Tile::column() / kMxBlock;
            atomicMax(&shared.square_amax[wide ? 0 : group * kMxGroups + across], amax);
        }
    }
    __syncthreads();
}

// Writes a scale tile that all threads have put into shared memory; a barrier precedes the call.
__device__ __forceinline__ void mx_store_scales(uint8* to, const uint32 (&scales)[kMxTile]) {
    if (threadIdx.x < kMxTile) {
        reinterpret_cast<uint32*>(to)[threadIdx.x] = scales[threadIdx.x];
    }
}

// Quantizes one vector rowwise, in row `row_in_tile` of the tile and column `column` of the matrix:
// data to `data_to`, the scale to `scales`. `amax` is the amax of the vector, or of its square;
// `exists` is false outside the matrix.
template <typename E>
__device__ __forceinline__ void mx_quantize_row_vector(const uint4& vector, uint32 amax,
                                                      uint32 row_in_tile, uint32 column,
                                                      bool exists, uint8* data_to,
                                                      uint32 (&scales)[kMxTile], uint32 columns,
                                                      uint32 flags, MxCounters& counters) {
    using Tile = MxTile<E>;
    constexpr int kPerWord = MxElement<E>::kPerWord;
    const bool floor = flags & kMxFloor, wide = flags & kMxWide, square = flags & kMxSquare;
    if (!square) {
#pragma unroll
        for (int lanes = 1; lanes < Tile::kBlockLanes; lanes *= 2) {
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
        }
        if (wide) {
#pragma unroll
            for (int lanes = Tile::kBlockLanes; lanes < Tile::kRowLanes; lanes *= 2) {
                amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
            }
        }
    }
    const MxScale scale = mx_scale(amax, floor);
    const uint32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    uint32 data[kPerWord];
    uint32 nonzero = 0xffffffffu;
#pragma unroll
    for (int quad = 0; quad < kPerWord; ++quad) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int index = 4 * quad + i;
            x[i] = mx_value<E>(words[index / kPerWord], index % kPerWord);
        }
        data[quad] = mx_encode(x, scale.reciprocal);
        nonzero &= nonzero_element_bits(data[quad]);
        if (floor) {
            counters.saturations += mx_saturations(x, scale.reciprocal);
        }
    }
    if (!all_elements_nonzero(nonzero)) {
        counters.underflows += mx_nonzero<E>(vector) - nonzero_elements(data[0]) -
                               (kPerWord == 2 ? nonzero_elements(data[kPerWord - 1]) : 0);
    }
    if (scale.code == 0 && mx_is_clamped(opaque(amax), floor)) {
        const uint32 group_mask = (wide ? kMxTile : kMxBlock) - 1;
        counters.clamps += (Tile::column() & group_mask) == 0 &&
                           (!square || (row_in_tile & group_mask) == 0);
    }

    if (exists) {
        if (columns % Tile::kVector == 0) {
            if (kPerWord == 2) {
                *reinterpret_cast<uint2*>(data_to) = make_uint2(data[0], data[kPerWord - 1]);
            } else {
                *reinterpret_cast<uint32*>(data_to) = data[0];
            }
        } else {
            mx_store_bytes(data_to, data, kPerWord, columns - column);
        }
    }
    if (Tile::column() % kMxBlock == 0) {
        const uint32 place = scale_row_place(row_in_tile) + Tile::column() / kMxBlock;
        reinterpret_cast<uint8*>(scales)[place] = exists ? scale.code : 0;
    }
}

// Quantizes columnwise the tile in shared memory. Called by all threads of the CTA.
template <typename E>
__device__ __forceinline__ void mx_quantize_columns(uint32 row0, uint32 column0,
                                                    const MxTarget& to, uint32 flags,
                                                    uint32* __restrict__ tile, MxShared& shared,
                                                    MxCounters& counters) {
    using Tile = MxTile<E>;
    using Element = MxElement<E>;
    constexpr int kPerWord = Element::kPerWord;
    const bool floor = flags & kMxFloor, wide = flags & kMxWide, square = flags & kMxSquare;
    const uint32 unit = threadIdx.x % Tile::kUnits;
    const uint32 group = threadIdx.x / Tile::kUnits;

    // Load one word of columns from 32 rows.
    uint32 words[kMxBlock];
    uint32 of_rows[4] = {0, 0, 0, 0};  // independent chains
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
        words[i] = tile[(group * kMxBlock + i) * Tile::kUnits + unit];
        of_rows[i % 4] = Element::larger(of_rows[i % 4], words[i]);
    }
    const uint32 largest = Element::larger(Element::larger(of_rows[0], of_rows[1]),
                                           Element::larger(of_rows[2], of_rows[3])) &
                           Element::kMagnitude;
    if (wide && !square) {
#pragma unroll
        for (int c = 0; c < kPerWord; ++c) {
            shared.column_amax[group][unit * kPerWord + c] = Element::bits(largest, c);
        }
    }
    // All threads have read the tile: its memory becomes the stage.
    __syncthreads();
    uint4* const stage = reinterpret_cast<uint4*>(tile);
#pragma unroll
    for (int c = 0; c < kPerWord; ++c) {
        const uint32 column = unit * kPerWord + c;
        uint32 amax = Element::bits(largest, c);
        if (square) {
            amax = shared.square_amax[wide ? 0 : group * kMxGroups + column / kMxBlock];
        } else if (wide) {
#pragma unroll
            for (int other = 0; other < kMxGroups; ++other) {
                amax = max(amax, shared.column_amax[other][column]);
            }
        }
        const MxScale scale = mx_scale(amax, floor);
        uint32 nonzero = 0xffffffffu;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 data[4];
#pragma unroll
            for (int quad = 0; quad < 4; ++quad) {
                float x[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    x[i] = mx_value<E>(words[half * 16 + quad * 4 + i], c);
                }
                data[quad] = mx_encode(x, scale.reciprocal);
                nonzero &= nonzero_element_bits(data[quad]);
                if (floor) {
                    counters.saturations += mx_saturations(x, scale.reciprocal);
                }
            }
            stage[column * 8 + ((group * 2 + half) ^ (unit % 8))] =
                make_uint4(data[0], data[1], data[2], data[3]);
        }
        if (!all_elements_nonzero(nonzero)) {
#pragma unroll
            for (int i = 0; i < kMxBlock; ++i) {
                const uint32 word = opaque(words[i]) & Element::kMagnitude;
                counters.underflows += Element::bits(word, c) != 0;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 data = stage[column * 8 + ((group * 2 + half) ^ (unit % 8))];
                counters.underflows -= nonzero_elements(data.x) + nonzero_elements(data.y) +
                                       nonzero_elements(data.z) + nonzero_elements(data.w);
            }
        }
        if (scale.code == 0 && mx_is_clamped(opaque(amax), floor)) {
            counters.clamps += (!wide || group == 0) &&
                               (!square || column % (wide ? kMxTile : kMxBlock) == 0);
        }
        const bool exists = column0 + column < to.columns && row0 + group * kMxBlock < to.rows;
        reinterpret_cast<uint8*>(shared.scales_t)[scale_row_place(column) + group] =
            exists ? scale.code : 0;
    }
    __syncthreads();

    // Write the data in lines of eight threads, then the scales.
#pragma unroll
    for (int i = 0; i < kMxTile * kMxTile / 16 / Tile::kThreads; ++i) {
        const uint32 index = i * Tile::kThreads + threadIdx.x;
        const uint32 in_tile = index / 8, chunk = index % 8;
        const uint32 column = column0 + in_tile, row = row0 + chunk * 16;
        if (column < to.columns && row < to.rows) {
            const uint4 data = stage[in_tile * 8 + (chunk ^ (in_tile / kPerWord % 8))];
            uint8* const target = to.data_t + static_cast<uint64>(column) * to.rows + row;
            if (to.rows % 16 == 0) {
                *reinterpret_cast<uint4*>(target) = data;
            } else {
                const uint32 of_vector[4] = {data.x, data.y, data.z, data.w};
                mx_store_bytes(target, of_vector, 4, to.rows - row);
            }
        }
    }
    if (column0 < to.columns && row0 < to.rows) {
        mx_store_scales(to.scale_tile_t(row0, column0), shared.scales_t);
    }
}

// Counts of a thread's vectors, from `own` with a stride of the CTA's threads; `largest` is their
// largest magnitude. Non-finite elements count once for each of `operands`.
template <typename E>
__device__ __forceinline__ void mx_count_vectors(const uint4* own, uint32 largest, uint32 operands,
                                                MxCounters& counters) {
    if (largest >= kInfinityBits) {
        largest = 0;
#pragma unroll 1
        for (int step = 0; step < kMxSteps; ++step) {
            const uint2 found = mx_survey<E>(own[step * MxTile<E>::kThreads]);
            counters.nonfinite += operands * found.x;
            largest = max(largest, found.y);
        }
    }
    counters.amax = max(counters.amax, largest);
}

// Slot of a thread's 16-byte vector of row `MxTile::row() + 16 * step`, columns `MxTile::column()`
// and following of the tile; zeros beyond the matrix.
template <typename E>
__device__ __forceinline__ uint4& mx_vector(uint32* tile, int step) {
    return reinterpret_cast<uint4*>(tile)[step * MxTile<E>::kThreads + threadIdx.x];
}

// Quantizes the tile whose first element is (row0, column0), after each thread has stored its
// vectors in `tile` (`MxTile::kTileBytes` of shared memory). Called by all threads of the CTA.
template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void mx_quantize_tile(uint32 row0, uint32 column0, const MxTarget& to,
                                                 uint32 flags, uint32* tile, MxShared& shared,
                                                 MxCounters& counters) {
    using Tile = MxTile<E>;
    constexpr uint32 kOperands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    const bool wide = flags & kMxWide, square = flags & kMxSquare;
    const uint4* const own = reinterpret_cast<const uint4*>(tile) + threadIdx.x;
    if (square) {
        mx_square_amax<E>(own, wide, shared);
    }
    const uint32 first_row = row0 + Tile::row(), column = column0 + Tile::column();
    uint8* data_to = to.data + static_cast<uint64>(first_row) * to.columns + column;
    const uint32 rows_left =
        column < to.columns && first_row < to.rows ? to.rows - first_row : 0;
    uint32 largest = 0;
#pragma unroll 2
    for (int step = 0; step < kMxSteps; ++step) {
        const uint4 vector = own[step * Tile::kThreads];
        uint32 amax = mx_magnitude<E>(vector);
        largest = max(largest, amax);
        if (kRow) {
            if (square) {
                const uint32 across = Tile::column() / kMxBlock;
                amax = shared.square_amax[wide ? 0 : step / 2 * kMxGroups + across];
            }
            const uint32 beyond_first = step * kMxStepRows;
            mx_quantize_row_vector<E>(vector, amax, Tile::row() + beyond_first, column,
                                     beyond_first < rows_left, data_to, shared.scales, to.columns,
                                     flags, counters);
            data_to += static_cast<uint64>(kMxStepRows) * to.columns;
        }
    }
    mx_count_vectors<E>(own, largest, kOperands, counters);
    __syncthreads();
    if (kRow && column0 < to.columns && row0 < to.rows) {
        mx_store_scales(to.scale_tile(row0, column0), shared.scales);
    }
    if (kColumn) {
        mx_quantize_columns<E>(row0, column0, to, flags, tile, shared, counters);
    } else {
        // The shared data may be overwritten.
        __syncthreads();
    }
}
