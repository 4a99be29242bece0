// Block quantization of an FP32 matrix to MXFP8 where 128 x 128 elements share a scale by the RCEIL
// rule, as weights do: data and scales along rows, down columns (stored transposed), or both.
//
// `quantize.cu` takes such matrices too. Here rows and columns are multiples of 128 and a CTA has
// one square, so that an element is quantized once for both operands: the columnwise data is the
// rowwise data transposed. A thread holds 16 rows of four columns in registers. It transposes the
// quantized bytes by permutations, four by four, and has 16 bytes of each of its columns then.
// They go through shared memory to be written in lines of 128 bytes:
//
//   stage[column][chunk ^ (column / 4 % 8)]: rows 16 * chunk and following of one column. Eight
//   threads write one chunk of columns four apart, or read eight chunks of one column: neither
//   meets a bank twice.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/mx_element.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_scale.cuh"
#include "layout/mx_statistics.cuh"
#include "ptx/fp8.cuh"

constexpr uint32 kThreads = 256;
constexpr int kRows = 16;      // rows of a thread, and vectors of four columns
constexpr int kQuads = kRows / 4;
constexpr uint32 kLanes = 32;  // threads of a row

// Byte `row` of word `column` is byte `column` of word `row`.
__device__ __forceinline__ void transpose_bytes(const uint32 (&rows)[4], uint32 (&columns)[4]) {
    const uint32 low01 = __byte_perm(rows[0], rows[1], 0x5140);
    const uint32 low23 = __byte_perm(rows[2], rows[3], 0x5140);
    const uint32 high01 = __byte_perm(rows[0], rows[1], 0x7362);
    const uint32 high23 = __byte_perm(rows[2], rows[3], 0x7362);
    columns[0] = __byte_perm(low01, low23, 0x5410);
    columns[1] = __byte_perm(low01, low23, 0x7632);
    columns[2] = __byte_perm(high01, high23, 0x5410);
    columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Bits of the largest magnitude of a thread's elements, NaN above infinity above all else.
__device__ __forceinline__ uint32 largest_magnitude(const uint4 (&vectors)[kRows]) {
    uint32 largest[4] = {0, 0, 0, 0};  // not one after the other
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
        largest[row % 4] = max(largest[row % 4], mx_magnitude<float>(vectors[row]));
    }
    return max(max(largest[0], largest[1]), max(largest[2], largest[3]));
}

// Writes a tile of scales that are all the same, by one warp.
__device__ __forceinline__ void store_scales(uint8* to, uint32 code) {
    const uint32 word = code * 0x01010101u;
    reinterpret_cast<uint4*>(to)[threadIdx.x % kLanes] = make_uint4(word, word, word, word);
}

template <bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_square(const float* __restrict__ x, const MxTarget& to,
                                                MxTotals* totals, uint64* statistics) {
    constexpr uint32 kOperands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    __shared__ uint4 stage[kColumn ? kMxTile * kMxTile / 16 : 1];
    __shared__ uint32 of_warps[kThreads / kLanes];
    __shared__ MxTallyShared of_tally;
    MxTally tally(of_tally, totals);
    MxCounters counters;
    const uint32 across = to.columns / kMxTile;
    const uint32 row0 = blockIdx.x / across * kMxTile, column0 = blockIdx.x % across * kMxTile;
    const uint32 warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const uint64 place =
        static_cast<uint64>(row0 + warp * kRows) * to.columns + column0 + lane * 4;

    uint4 vectors[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
        vectors[row] = *reinterpret_cast<const uint4*>(
            x + place + static_cast<uint64>(row) * to.columns);
    }
    const uint32 largest = largest_magnitude(vectors);
    const uint32 of_warp = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) {
        of_warps[warp] = of_warp;
    }
    __syncthreads();
    uint32 amax = of_warps[0];
#pragma unroll
    for (uint32 other = 1; other < kThreads / kLanes; ++other) {
        amax = max(amax, of_warps[other]);
    }
    const MxScale scale = mx_scale(amax, false);
    counters.amax = largest;
    if (largest >= kInfinityBits) {
        counters.amax = 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            const uint2 found = mx_survey<float>(vectors[row]);
            counters.nonfinite += kOperands * found.x;
            counters.amax = max(counters.amax, found.y);
        }
    }
    if (threadIdx.x == 0 && mx_is_clamped(amax, false)) {
        counters.clamps = kOperands;
    }

    uint32 data[kRows];
    uint32 nonzero = 0xffffffffu;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
        const float of_row[4] = {
            __uint_as_float(vectors[row].x), __uint_as_float(vectors[row].y),
            __uint_as_float(vectors[row].z), __uint_as_float(vectors[row].w)};
        data[row] = mx_encode(of_row, scale.reciprocal);
        nonzero &= nonzero_element_bits(data[row]);
    }
    if (!all_elements_nonzero(nonzero)) {
        uint32 vanished = 0;
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            vanished += mx_nonzero<float>(vectors[row]) - nonzero_elements(data[row]);
        }
        counters.underflows = kOperands * vanished;
    }
    tally.leave(counters);

    if (kRow) {
#pragma unroll
        for (int row = 0; row < kRows; ++row) {
            *reinterpret_cast<uint32*>(to.data + place + static_cast<uint64>(row) * to.columns) =
                data[row];
        }
        if (warp == 0) {
            store_scales(to.scale_tile(row0, column0), scale.code);
        }
    }
    if (kColumn) {
        uint32 of_columns[4][kQuads];
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
            const uint32 rows[4] = {data[4 * quad], data[4 * quad + 1], data[4 * quad + 2],
                                    data[4 * quad + 3]};
            uint32 columns[4];
            transpose_bytes(rows, columns);
#pragma unroll
            for (int column = 0; column < 4; ++column) {
                of_columns[column][quad] = columns[column];
            }
        }
#pragma unroll
        for (int column = 0; column < 4; ++column) {
            const uint32(&words)[kQuads] = of_columns[column];
            stage[(lane * 4 + column) * 8 + (warp ^ lane % 8)] =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        if (warp == 1) {
            store_scales(to.scale_tile_t(row0, column0), scale.code);
        }
    }
    __syncthreads();
    tally.give();
    if (kColumn) {
        constexpr uint32 kLines = kThreads / 8;  // columns that are written together
        const uint32 line = threadIdx.x / 8, chunk = threadIdx.x % 8;
#pragma unroll
        for (uint32 i = 0; i < kMxTile / kLines; ++i) {
            const uint32 column = line + i * kLines;
            const uint64 first = static_cast<uint64>(column0 + column) * to.rows + row0;
            *reinterpret_cast<uint4*>(to.data_t + first + chunk * 16) =
                stage[column * 8 + (chunk ^ column / 4 % 8)];
        }
    }
    tally.finish(gridDim.x * gridDim.y,
                 static_cast<uint64>(kOperands) * to.rows * to.columns * gridDim.y, statistics);
}

// x [matrices, rows, columns]; outputs of each as in `MxTarget`; statistics [6] of all. All 16-byte
// aligned. A CTA for each square along x of the grid, and for each matrix along y.
#define QUANTIZE_KERNEL(name, row, column)                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        name(const float* __restrict__ x, uint8* __restrict__ data, uint8* __restrict__ scales,  \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, MxTotals* totals, uint64* statistics) {                             \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        const uint64 first = static_cast<uint64>(rows) * columns * blockIdx.y;                   \
        quantize_square<row, column>(x + first, to.of_stack(blockIdx.y), totals, statistics);    \
    }

QUANTIZE_KERNEL(quantize_square_row, true, false)
QUANTIZE_KERNEL(quantize_square_column, false, true)
QUANTIZE_KERNEL(quantize_square_both, true, true)
