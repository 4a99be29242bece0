// Epilogue of a GEMM with accumulators in tensor memory: stores the GEMM output, an activation of
// it, and the MXFP8 operands of the last of these, rowwise, columnwise, or both. Bit-identical to
// separate kernels: the input of each step is rounded to BF16, as the previous step would have
// stored it.
//
// As in epilogue/store_tensor_tile.cuh each of four warps takes 32 rows, in subtiles of 128 bytes
// (64 elements) per row, through 4 KiB of shared memory:
//   a lane writes the accumulators of its row;
//   eight lanes per row read 16 bytes each, store them, and replace them by the activation;
//   a lane reads two columns, whose 32 elements each share a scale, and quantizes them;
//   a lane reads its row, two groups of 32, and replaces elements by quantized data;
//   four lanes per row store this data.
// Columns are a multiple of 8, or of 32 when quantizing. Elements beyond the rows are zero and
// affect neither scales nor counters.
#pragma once

#include "common/activation.cuh"
#include "common/bf16x8.cuh"
#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "epilogue/store_tensor_tile.cuh"
#include "layout/mx_element.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_scale.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"
#include "layout/scale_tile.cuh"
#include "mma/sm100_tile.cuh"

// Activation function, as passed by the host.
constexpr uint32 kNoActivation = 0;
constexpr uint32 kGelu = 1;
constexpr uint32 kGeluTanh = 2;
constexpr uint32 kGeluBackward = 3;
constexpr uint32 kGeluTanhBackward = 4;

// Epilogue outputs, each [rows, columns]; null = skip.
struct FusedResult {
    TileResult<bf16> gemm;
    const bf16* forward;  // forward-pass tensor at the accumulators' position, for a gradient
    bf16* activated;
    MxTarget quantized;
    uint32 activation;
    uint32 flags;  // of the quantization, kMxFloor or none
};

constexpr int kFusedColumns = 64;     // elements of a row at a time
constexpr int kFusedBlocks = kFusedColumns / kMxBlock;
static_assert(kFusedBlocks * kMxBlock == kFusedColumns, "whole groups");

// Shared memory of 16-byte unit `unit` (of eight) of a row.
__device__ __forceinline__ uint4& fused_unit(uint8* staged, int32 row, int32 unit) {
    return *reinterpret_cast<uint4*>(staged + row * 128 + (unit ^ (row & 7)) * 16);
}

template <typename Function>
__device__ __forceinline__ uint4 of_elements(const uint4& vector, const Function& function) {
    float values[8];
    unpack_bf16x8(vector, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = function(values[i]);
    }
    return pack_bf16x8(values);
}

template <typename Function>
__device__ __forceinline__ uint4 of_elements(const uint4& vector, const uint4& other,
                                             const Function& function) {
    float values[8], others[8];
    unpack_bf16x8(vector, values);
    unpack_bf16x8(other, others);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = function(values[i], others[i]);
    }
    return pack_bf16x8(values);
}

// Applies the activation to eight elements, the first of which has index `at` in the matrices.
__device__ __forceinline__ uint4 activate(const uint4& vector, const FusedResult& result,
                                          uint64 at) {
    if (result.activation == kGelu) {
        return of_elements(vector, [](float x) { return gelu(x); });
    }
    if (result.activation == kGeluTanh) {
        return of_elements(vector, [](float x) { return gelu_tanh(x); });
    }
    const uint4 forward = __ldg(reinterpret_cast<const uint4*>(result.forward + at));
    if (result.activation == kGeluBackward) {
        return of_elements(vector, forward,
                           [](float dy, float x) { return dy * gelu_slope(x); });
    }
    return of_elements(vector, forward,
                       [](float dy, float x) { return dy * gelu_tanh_slope(x); });
}

// Stores 32 rows of accumulators from (row, column) on, and replaces them by the activation.
__device__ __forceinline__ void activate_subtile(const FusedResult& result, int32 row,
                                                int32 column, uint8* staged) {
    const int32 lane = threadIdx.x % 32;
    const int32 unit = lane % 8;
    const int32 columns = result.gemm.columns;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const int32 r = i * 4 + lane / 8;
        uint4& place = fused_unit(staged, r, unit);
        uint4 value = make_uint4(0, 0, 0, 0);
        if (row + r < result.gemm.rows && column + unit * 8 < columns) {
            const uint64 at = static_cast<uint64>(row + r) * columns + column + unit * 8;
            value = place;
            if (result.gemm.data != nullptr) {
                *reinterpret_cast<uint4*>(result.gemm.data + at) = value;
            }
            if (result.activation != kNoActivation) {
                value = activate(value, result, at);
                if (result.activated != nullptr) {
                    *reinterpret_cast<uint4*>(result.activated + at) = value;
                }
            }
        }
        place = value;
    }
}

// Counts a group of 32 elements if its scale was clamped.
__device__ __forceinline__ void count_clamp(uint32 amax, const MxScale& scale, bool floor,
                                            MxCounters& counters) {
    if (scale.code == 0 && mx_is_clamped(amax, floor)) {
        ++counters.clamps;
    }
}

// Whether a scale tile covers (row, column); tiles include padding beyond the matrix.
__device__ __forceinline__ bool in_scale_tile(const MxTarget& to, uint32 row, uint32 column) {
    return row / kScaleTileRows < scale_tiles_across(to.rows) &&
           column / kScaleTileElements < scale_tiles_across(to.columns);
}

// Quantizes 32 rows of 64 columns, from (row, column) on, columnwise.
__device__ __forceinline__ void copy_columns(const FusedResult& result, int32 row, int32 column,
                                             const uint8* staged, MxCounters& counters) {
    using Element = MxElement<bf16>;
    const MxTarget& to = result.quantized;
    const bool floor = result.flags & kMxFloor;
    const int32 lane = threadIdx.x % 32;
    const uint32 first = column + 2 * lane;
    uint32 words[kMxBlock];
    uint32 largest = 0;
#pragma unroll
    for (int r = 0; r < static_cast<int>(kMxBlock); ++r) {
        words[r] = *reinterpret_cast<const uint32*>(staged + r * 128 +
                                                    ((lane / 4) ^ (r & 7)) * 16 + lane % 4 * 4);
        largest = Element::larger(largest, words[r]);
    }
    if (!in_scale_tile(to, row, first)) {
        return;
    }
    uint8* const scales_to = to.scale_tile_t(row, first) + row % kMxTile / kMxBlock;
    if (first >= to.columns || row >= static_cast<int32>(to.rows)) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            scales_to[scale_row_place(first % kScaleTileRows + c)] = 0;
        }
        return;
    }
    largest &= Element::kMagnitude;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        const uint32 amax = Element::bits(largest, c);
        const MxScale scale = mx_scale(amax, floor);
        count_clamp(amax, scale, floor, counters);
        uint8* data_to = to.data_t + static_cast<uint64>(first + c) * to.rows + row;
        uint32 data[8];
        uint32 nonzero = 0xffffffffu;
#pragma unroll
        for (int quad = 0; quad < 8; ++quad) {
            float x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[i] = mx_value<bf16>(words[quad * 4 + i], c);
            }
            data[quad] = mx_encode(x, scale.reciprocal);
            nonzero &= nonzero_element_bits(data[quad]);
            if (floor) {
                counters.saturations += mx_saturations(x, scale.reciprocal);
            }
        }
        if (!all_elements_nonzero(nonzero)) {
            uint32 vanished = 0;
#pragma unroll
            for (int r = 0; r < static_cast<int>(kMxBlock); ++r) {
                vanished += Element::bits(words[r] & Element::kMagnitude, c) != 0;
            }
#pragma unroll
            for (int quad = 0; quad < 8; ++quad) {
                vanished -= nonzero_elements(data[quad]);
            }
            counters.underflows += vanished;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (to.rows % 16 == 0) {
                if (row + half * 16 < static_cast<int32>(to.rows)) {
                    *reinterpret_cast<uint4*>(data_to + half * 16) =
                        make_uint4(data[half * 4], data[half * 4 + 1], data[half * 4 + 2],
                                   data[half * 4 + 3]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    if (row + half * 16 + i < static_cast<int32>(to.rows)) {
                        data_to[half * 16 + i] =
                            static_cast<uint8>(data[half * 4 + i / 4] >> (8 * (i % 4)));
                    }
                }
            }
        }
        scales_to[scale_row_place(first % kScaleTileRows + c)] = scale.code;
    }
}

// Quantizes the calling lane's row rowwise: data replaces the elements, in the first 64 bytes.
// Returns the two scales.
__device__ __forceinline__ uint32 quantize_row(const FusedResult& result, uint8* staged,
                                               MxCounters& counters) {
    const bool floor = result.flags & kMxFloor;
    const int32 lane = threadIdx.x % 32;
    uint32 scales = 0;
#pragma unroll 1
    for (int block = 0; block < kFusedBlocks; ++block) {
        uint4 vectors[4];
        uint32 amax = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            vectors[i] = fused_unit(staged, lane, block * 4 + i);
            amax = max(amax, mx_magnitude<bf16>(vectors[i]));
        }
        const MxScale scale = mx_scale(amax, floor);
        count_clamp(amax, scale, floor, counters);
        scales |= scale.code << (8 * block);
        uint32 data[8];
        uint32 nonzero = 0xffffffffu;
#pragma unroll
        for (int quad = 0; quad < 8; ++quad) {
            const uint32 low = quad % 2 == 0 ? vectors[quad / 2].x : vectors[quad / 2].z;
            const uint32 high = quad % 2 == 0 ? vectors[quad / 2].y : vectors[quad / 2].w;
            const float x[4] = {low_to_f32(low), high_to_f32(low), low_to_f32(high),
                                high_to_f32(high)};
            data[quad] = mx_encode(x, scale.reciprocal);
            nonzero &= nonzero_element_bits(data[quad]);
            if (floor) {
                counters.saturations += mx_saturations(x, scale.reciprocal);
            }
        }
        if (!all_elements_nonzero(nonzero)) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                counters.underflows += mx_nonzero<bf16>(vectors[i]) -
                                       nonzero_elements(data[2 * i]) -
                                       nonzero_elements(data[2 * i + 1]);
            }
        }
        fused_unit(staged, lane, block * 2) = make_uint4(data[0], data[1], data[2], data[3]);
        fused_unit(staged, lane, block * 2 + 1) =
            make_uint4(data[4], data[5], data[6], data[7]);
    }
    return scales;
}

// Stores the quantized data of 32 rows, 64 bytes per row, from (row, column) on.
__device__ __forceinline__ void write_data(const MxTarget& to, int32 row, int32 column,
                                            uint8* staged) {
    const int32 lane = threadIdx.x % 32;
    const int32 unit = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int32 r = i * 8 + lane / 4;
        if (row + r < static_cast<int32>(to.rows) &&
            column + unit * 16 < static_cast<int32>(to.columns)) {
            *reinterpret_cast<uint4*>(to.data + static_cast<uint64>(row + r) * to.columns +
                                      column + unit * 16) = fused_unit(staged, r, unit);
        }
    }
}

// Stores the scales of a lane's row for `kColumns` columns from `column` on in the scale tiles.
// Each byte of `scales` is a scale. Scales of padding are zero.
template <int kColumns>
__device__ __forceinline__ void write_row_scales(const MxTarget& to, int32 row, int32 column,
                                                 uint64 scales) {
#pragma unroll
    for (int first = 0; first < kColumns; first += kScaleTileElements) {
        if (in_scale_tile(to, row, column + first)) {
            uint8* const tile = to.scale_tile(row, column + first);
            *reinterpret_cast<uint32*>(tile + scale_row_place(row % kScaleTileRows)) =
                static_cast<uint32>(scales >> (first / kScaleTileElements * 32));
        }
    }
}

// Counts over the elements of the calling lane's row: the largest finite magnitude, and non-finite
// elements, once for each of `operands`.
__device__ __forceinline__ void survey_row(uint8* staged, uint32 operands, MxCounters& counters) {
    const int32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (int unit = 0; unit < 8; ++unit) {
        const uint4 vector = fused_unit(staged, lane, unit);
        uint32 largest = mx_magnitude<bf16>(vector);
        if (largest >= kInfinityBits) {
            const uint2 found = mx_survey<bf16>(vector);
            counters.nonfinite += operands * found.x;
            largest = found.y;
        }
        counters.amax = max(counters.amax, largest);
    }
}

// As store_tensor_tile, with activation and quantization.
template <int kColumns, int kReleased, typename Release>
__device__ __forceinline__ void store_fused_tile(const FusedResult& result, int32 row,
                                                 int32 column, uint32 address, bool backwards,
                                                 uint8* staged, MxCounters& counters,
                                                 Release release) {
    constexpr int kSubtiles = kColumns / kFusedColumns;
    const int32 lane = threadIdx.x % 32;
    const bool by_rows = result.quantized.data != nullptr;
    const bool by_columns = result.quantized.data_t != nullptr;
    uint64 scales = 0;
#pragma unroll 1
    for (int32 i = 0; i < kSubtiles; ++i) {
        const int32 at = (backwards ? kSubtiles - 1 - i : i) * kFusedColumns;
        uint4 subtile[8];
        load_subtile(subtile, address + at, result.gemm, column + at);
        if (i + 1 == kReleased) {
            release();
        }
        // Other lanes may still read the previous subtile.
        __syncwarp();
#pragma unroll
        for (int unit = 0; unit < 8; ++unit) {
            fused_unit(staged, lane, unit) = subtile[unit];
        }
        __syncwarp();
        activate_subtile(result, row, column + at, staged);
        if (by_rows || by_columns) {
            __syncwarp();
            survey_row(staged, by_rows + by_columns, counters);
            if (by_columns) {
                copy_columns(result, row, column + at, staged, counters);
            }
            if (by_rows) {
                if (by_columns) {
                    __syncwarp();
                }
                const uint64 found = quantize_row(result, staged, counters);
                scales |= found << (8 * (at / kMxBlock));
                __syncwarp();
                write_data(result.quantized, row, column + at, staged);
            }
        }
    }
    if (by_rows) {
        write_row_scales<kColumns>(result.quantized, row + lane, column, scales);
    }
}

// Epilogue warps: stores all tiles.
template <typename S, typename Tiles>
__device__ __forceinline__ void store_fused_tiles(const sm100::Shared<S>& shared,
                                                  uint32 tensor_base, Tiles tiles,
                                                  const FusedResult& result,
                                                  MxCounters& counters) {
    constexpr int kSubtiles = S::kTileN / kFusedColumns;
    take_tensor_tiles(
        shared, tensor_base, tiles,
        [&](const TilePlace& place, uint32 own_row, uint32 address, bool backwards,
            uint8* staged, auto release) {
            store_fused_tile<S::kTileN, kReleasedSubtiles<S, kSubtiles>>(
                result, place.row + own_row, place.column, address, backwards, staged, counters,
                release);
        });
}

// Arguments of fused kernels after the operands: bias [n]; GEMM output [m, n]; for a gradient, the
// forward-pass tensor [m, n]; activation [m, n]; quantized operands as in `MxTarget`; null = absent
// or not stored. Then extents, the activation function, flags of the quantization, totals and
// statistics [6] if quantized.
#define FUSED_ARGUMENTS                                                                          \
    const bf16 *__restrict__ bias, bf16 *__restrict__ gemm, const bf16 *__restrict__ forward,    \
        bf16 *__restrict__ activated, uint8 *__restrict__ data, uint8 *__restrict__ scales,      \
        uint8 *__restrict__ data_t, uint8 *__restrict__ scales_t, int32 m, int32 n, int32 k,     \
        uint32 activation, uint32 flags, MxTotals *totals, uint64 *statistics

// The same arguments as a FusedResult.
#define FUSED_RESULT                                                                             \
    FusedResult {                                                                                \
        TileResult<bf16>{gemm, bias, m, n, false}, forward, activated,                           \
            MxTarget{data,  scales, data_t, scales_t, static_cast<uint32>(m),                    \
                     static_cast<uint32>(n)},                                                    \
            activation, flags                                                                    \
    }

// All threads of all CTAs, at the end: writes the counters of the quantization, if any.
__device__ __forceinline__ void write_fused_statistics(const FusedResult& result,
                                                       const MxCounters& counters,
                                                       MxTotals* totals, uint64* statistics) {
    const uint64 operands =
        (result.quantized.data != nullptr) + (result.quantized.data_t != nullptr);
    if (operands > 0) {
        const uint64 elements = operands * result.quantized.rows * result.quantized.columns;
        mx_write_statistics(counters, gridDim.x, totals, elements, statistics);
    }
}
