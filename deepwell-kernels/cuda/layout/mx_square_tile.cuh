// Quantization from registers of a tile of 128 x 128 FP32 elements that share one scale under the
// RCEIL rule: rowwise, columnwise (stored transposed), or both.
//
// Each element is quantized once for both operands: the columnwise data is the transposed rowwise
// data. A thread holds 16 rows of four columns. It transposes the quantized bytes by byte
// permutations, four by four, which gives 16 bytes of each of its columns. These go through shared
// memory to be written in lines of 128 bytes:
//
//   stage[column][chunk ^ (column / 4 % 8)]: rows 16 * chunk and following of one column. Eight
//   threads write one chunk of columns four apart, or read eight chunks of one column: both are
//   free of bank conflicts.
#pragma once

#include "common/types.cuh"
#include "layout/mx_element.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_scale.cuh"
#include "layout/mx_statistics.cuh"
#include "ptx/fp8.cuh"

constexpr uint32 kMxSquareThreads = 256;
constexpr int kMxSquareRows = 16;  // rows per thread, and vectors of four columns
constexpr int kMxSquareQuads = kMxSquareRows / 4;
constexpr uint32 kMxSquareLanes = 32;  // threads per row
// Vectors of the stage that transposes columns.
constexpr uint32 kMxSquareStage = kMxTile * kMxTile / 16;

// In shared memory.
struct MxSquareShared {
    uint32 of_warps[kMxSquareThreads / kMxSquareLanes];
};

// First row and first column of a thread in a tile.
__device__ __forceinline__ uint32 mx_square_row() {
    return threadIdx.x / kMxSquareLanes * kMxSquareRows;
}
__device__ __forceinline__ uint32 mx_square_column() {
    return threadIdx.x % kMxSquareLanes * 4;
}

// Transposes 4 x 4 bytes: byte `row` of word `column` is byte `column` of word `row`.
__device__ __forceinline__ void mx_transpose_bytes(const uint32 (&rows)[4],
                                                   uint32 (&columns)[4]) {
    const uint32 low01 = __byte_perm(rows[0], rows[1], 0x5140);
    const uint32 low23 = __byte_perm(rows[2], rows[3], 0x5140);
    const uint32 high01 = __byte_perm(rows[0], rows[1], 0x7362);
    const uint32 high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Bits of the largest magnitude of a thread's elements; the order is finite, infinity, NaN.
__device__ __forceinline__ uint32 mx_square_magnitude(const uint4 (&vectors)[kMxSquareRows]) {
    uint32 largest[4] = {0, 0, 0, 0};  // independent chains
#pragma unroll
    for (int row = 0; row < kMxSquareRows; ++row) {
        largest[row % 4] = max(largest[row % 4], mx_magnitude<float>(vectors[row]));
    }
    return max(max(largest[0], largest[1]), max(largest[2], largest[3]));
}

// Writes a scale tile of equal scales, by one warp.
__device__ __forceinline__ void mx_square_store_scales(uint8* to, uint32 code) {
    const uint32 word = code * 0x01010101u;
    reinterpret_cast<uint4*>(to)[threadIdx.x % kMxSquareLanes] = make_uint4(word, word, word, word);
}

// Called by all threads, each with its vectors of the tile at (row0, column0). `stage`
// [kMxSquareStage] is used for columns alone, and only after a barrier that follows the use of all
// vectors. The caller finishes the tally.
template <bool kRow, bool kColumn>
__device__ __forceinline__ void mx_quantize_square(const uint4 (&vectors)[kMxSquareRows],
                                                   uint32 row0, uint32 column0,
                                                   const MxTarget& to, uint4* stage,
                                                   MxSquareShared& shared, MxTally& tally) {
    constexpr uint32 kOperands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    MxCounters counters;
    const uint32 warp = threadIdx.x / kMxSquareLanes, lane = threadIdx.x % kMxSquareLanes;
    const uint64 place = static_cast<uint64>(row0 + mx_square_row()) * to.columns + column0 +
                         mx_square_column();
    const uint32 largest = mx_square_magnitude(vectors);
    const uint32 of_warp = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) {
        shared.of_warps[warp] = of_warp;
    }
    __syncthreads();
    uint32 amax = shared.of_warps[0];
#pragma unroll
    for (uint32 other = 1; other < kMxSquareThreads / kMxSquareLanes; ++other) {
        amax = max(amax, shared.of_warps[other]);
    }
    const MxScale scale = mx_scale(amax, false);
    counters.amax = largest;
    if (largest >= kInfinityBits) {
        counters.amax = 0;
#pragma unroll
        for (int row = 0; row < kMxSquareRows; ++row) {
            const uint2 found = mx_survey<float>(vectors[row]);
            counters.nonfinite += kOperands * found.x;
            counters.amax = max(counters.amax, found.y);
        }
    }
    if (threadIdx.x == 0 && mx_is_clamped(amax, false)) {
        counters.clamps = kOperands;
    }

    uint32 data[kMxSquareRows];
    uint32 nonzero = 0xffffffffu;
#pragma unroll
    for (int row = 0; row < kMxSquareRows; ++row) {
        const float of_row[4] = {
            __uint_as_float(vectors[row].x), __uint_as_float(vectors[row].y),
            __uint_as_float(vectors[row].z), __uint_as_float(vectors[row].w)};
        data[row] = mx_encode(of_row, scale.reciprocal);
        nonzero &= nonzero_element_bits(data[row]);
    }
    if (!all_elements_nonzero(nonzero)) {
        uint32 vanished = 0;
#pragma unroll
        for (int row = 0; row < kMxSquareRows; ++row) {
            vanished += mx_nonzero<float>(vectors[row]) - nonzero_elements(data[row]);
        }
        counters.underflows = kOperands * vanished;
    }
    tally.leave(counters);

    if (kRow) {
#pragma unroll
        for (int row = 0; row < kMxSquareRows; ++row) {
            *reinterpret_cast<uint32*>(to.data + place + static_cast<uint64>(row) * to.columns) =
                data[row];
        }
        if (warp == 0) {
            mx_square_store_scales(to.scale_tile(row0, column0), scale.code);
        }
    }
    if (kColumn) {
        uint32 of_columns[4][kMxSquareQuads];
#pragma unroll
        for (int quad = 0; quad < kMxSquareQuads; ++quad) {
            const uint32 rows[4] = {data[4 * quad], data[4 * quad + 1], data[4 * quad + 2],
                                    data[4 * quad + 3]};
            uint32 columns[4];
            mx_transpose_bytes(rows, columns);
#pragma unroll
            for (int column = 0; column < 4; ++column) {
                of_columns[column][quad] = columns[column];
            }
        }
#pragma unroll
        for (int column = 0; column < 4; ++column) {
            const uint32(&words)[kMxSquareQuads] = of_columns[column];
            stage[(lane * 4 + column) * 8 + (warp ^ lane % 8)] =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        if (warp == 1) {
            mx_square_store_scales(to.scale_tile_t(row0, column0), scale.code);
        }
    }
    __syncthreads();
    tally.give();
    if (kColumn) {
        constexpr uint32 kLines = kMxSquareThreads / 8;  // columns that are written together
        const uint32 line = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
        for (uint32 i = 0; i < kMxTile / kLines; ++i) {
            const uint32 column = line + i * kLines;
            const uint64 first = static_cast<uint64>(column0 + column) * to.rows + row0;
            *reinterpret_cast<uint4*>(to.data_t + first + chunk * 16) =
                stage[column * 8 + (chunk ^ column / 4 % 8)];
        }
    }
}
