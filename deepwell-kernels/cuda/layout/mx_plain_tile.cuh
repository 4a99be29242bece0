// The quantization of `layout/mx_tile.cuh` for what training asks for nearly always: BF16, rows and
// columns that consist of whole tiles, the RCEIL rule, groups of 1x32 or 1x128 elements. The same
// codes, scales and counters from about half as many instructions: nothing is asked of the flags or
// the edges, and two elements are scaled at a time.
//
// Scaling in BF16 gives the codes that scaling in FP32 gives: a factor is a power of two, so that a
// product is exact unless it is less than 2^-126, which is zero in E4M3 in any case.
#pragma once

#include "common/types.cuh"
#include "layout/mx_element.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_scale.cuh"
#include "ptx/fp8.cuh"
#include "ptx/packed.cuh"

using PlainTile = MxTile<bf16>;

// Steps of the row copy that a thread has under way at a time.
constexpr int kMxPlainTogether = 4;

// The same for all tiles; a matrix of no rows has none, though a block may come for one.
__device__ __forceinline__ bool mx_is_plain(const MxTarget& to, uint32 flags) {
    return (flags & (kMxFloor | kMxSquare)) == 0 && to.rows >= kMxTile &&
           to.rows % kMxTile == 0 && to.columns % kMxTile == 0;
}

// Counts of the pieces of a thread, at `own` and every block of threads further, of which `largest`
// is the largest magnitude. What is not finite counts once for each of `copies`.
template <typename E>
__device__ __forceinline__ void mx_count_pieces(const uint4* own, uint32 largest, uint32 copies,
                                                MxCounters& counters) {
    if (largest >= kInfinityBits) {
        largest = 0;
#pragma unroll 1
        for (int step = 0; step < kMxSteps; ++step) {
            const uint2 found = mx_survey<E>(own[step * MxTile<E>::kThreads]);
            counters.nonfinite += copies * found.x;
            largest = max(largest, found.y);
        }
    }
    counters.amax = max(counters.amax, largest);
}

// Scale of a group by its largest magnitude; where `counts`, it is counted as clamped if it is.
__device__ __forceinline__ MxScale mx_plain_scale(uint32 amax, bool counts, MxCounters& counters) {
    if (!mx_has_normal_scale(amax)) {
        counters.clamps += counts && mx_is_clamped(amax, false);
    }
    return mx_scale(amax, false);
}

// The upper halves, which is all there is of factors, of two numbers.
__device__ __forceinline__ uint32 mx_factors(const MxScale& low, const MxScale& high) {
    return __byte_perm(__float_as_uint(low.reciprocal), __float_as_uint(high.reciprocal), 0x7632);
}

// Row copy. Gives the largest magnitude of this thread's pieces.
template <bool kWide>
__device__ __forceinline__ uint32 mx_plain_rows(const uint4* __restrict__ own, uint32 row0,
                                                uint32 column0, const MxTarget& to,
                                                MxCounters& counters) {
    constexpr uint32 kGroup = kWide ? kMxTile : kMxBlock;
    const uint32 row = row0 + PlainTile::row(), column = column0 + PlainTile::column();
    const uint32 blocks = to.columns / kMxBlock;
    const bool leads = PlainTile::column() % kGroup == 0;
    uint8* codes_to = to.codes + static_cast<uint64>(row) * to.columns + column;
    uint8* scales_to = to.scales + static_cast<uint64>(row) * blocks + column / kMxBlock;
    uint32 largest = 0;
#pragma unroll kMxPlainTogether
    for (int step = 0; step < kMxSteps; ++step) {
        const uint4 piece = own[step * PlainTile::kThreads];
        uint32 amax = mx_magnitude<bf16>(piece);
        largest = max(largest, amax);
#pragma unroll
        for (int lanes = 1; lanes < kGroup / PlainTile::kPiece; lanes *= 2) {
            amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
        }
        const MxScale scale = mx_plain_scale(amax, leads, counters);
        const uint32 factors = mx_factors(scale, scale);
        const uint32 words[4] = {
            multiply_bf16x2(piece.x, factors), multiply_bf16x2(piece.y, factors),
            multiply_bf16x2(piece.z, factors), multiply_bf16x2(piece.w, factors)};
        uint32 codes[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[i] = to_e4m3x4(low_to_f32(words[2 * i]), high_to_f32(words[2 * i]),
                                 low_to_f32(words[2 * i + 1]), high_to_f32(words[2 * i + 1]));
        }
        if (!all_codes_nonzero(nonzero_code_bits(codes[0]) & nonzero_code_bits(codes[1]))) {
            counters.underflows +=
                mx_nonzero<bf16>(piece) - nonzero_codes(codes[0]) - nonzero_codes(codes[1]);
        }
        *reinterpret_cast<uint2*>(codes_to) = make_uint2(codes[0], codes[1]);
        if (leads) {
            if (kWide) {
                *reinterpret_cast<uint32*>(scales_to) = scale.code * 0x01010101u;
            } else {
                *scales_to = scale.code;
            }
        }
        codes_to += static_cast<uint64>(kMxStepRows) * to.columns;
        scales_to += static_cast<uint64>(kMxStepRows) * blocks;
    }
    return largest;
}

// Column copy of the tile that lies in shared memory.
template <bool kWide>
__device__ __forceinline__ void mx_plain_columns(uint32 row0, uint32 column0, const MxTarget& to,
                                                 uint32* __restrict__ tile, MxShared& shared,
                                                 MxCounters& counters) {
    using Element = MxElement<bf16>;
    const uint32 unit = threadIdx.x % PlainTile::kUnits;
    const uint32 group = threadIdx.x / PlainTile::kUnits;
    uint32 words[kMxBlock];
    uint32 of_rows[4] = {0, 0, 0, 0};  // not one after the other
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
        words[i] = tile[(group * kMxBlock + i) * PlainTile::kUnits + unit];
        of_rows[i % 4] = Element::larger(of_rows[i % 4], words[i]);
    }
    uint32 largest = Element::larger(Element::larger(of_rows[0], of_rows[1]),
                                     Element::larger(of_rows[2], of_rows[3]));
    if (kWide) {
        shared.column_amax[group][unit] = largest;
    }
    // Nobody reads the tile from here on: its memory becomes the stage.
    __syncthreads();
    if (kWide) {
#pragma unroll
        for (int other = 0; other < kMxGroups; ++other) {
            largest = Element::larger(largest, shared.column_amax[other][unit]);
        }
    }
    largest &= Element::kMagnitude;
    const bool leads = !kWide || group == 0;
    const MxScale scales[2] = {mx_plain_scale(Element::bits(largest, 0), leads, counters),
                               mx_plain_scale(Element::bits(largest, 1), leads, counters)};
    const uint32 factors = mx_factors(scales[0], scales[1]);
    // This thread's chunks of the stage: `place(column, half)`.
    uint4* const stage = reinterpret_cast<uint4*>(tile);
    const auto place = [=](int c, int half) {
        return (unit * 2 + c) * 8 + ((group * 2 + half) ^ (unit % 8));
    };
    uint32 nonzero[2] = {0xffffffffu, 0xffffffffu};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32 codes[2][4];
#pragma unroll
        for (int quad = 0; quad < 4; ++quad) {
            uint32 scaled[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scaled[i] = multiply_bf16x2(words[half * 16 + quad * 4 + i], factors);
            }
            codes[0][quad] = to_e4m3x4(low_to_f32(scaled[0]), low_to_f32(scaled[1]),
                                       low_to_f32(scaled[2]), low_to_f32(scaled[3]));
            codes[1][quad] = to_e4m3x4(high_to_f32(scaled[0]), high_to_f32(scaled[1]),
                                       high_to_f32(scaled[2]), high_to_f32(scaled[3]));
            nonzero[0] &= nonzero_code_bits(codes[0][quad]);
            nonzero[1] &= nonzero_code_bits(codes[1][quad]);
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            stage[place(c, half)] =
                make_uint4(codes[c][0], codes[c][1], codes[c][2], codes[c][3]);
        }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        if (!all_codes_nonzero(nonzero[c])) {
#pragma unroll
            for (int i = 0; i < kMxBlock; ++i) {
                counters.underflows += Element::bits(words[i] & Element::kMagnitude, c) != 0;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 codes = stage[place(c, half)];
                counters.underflows -= nonzero_codes(codes.x) + nonzero_codes(codes.y) +
                                       nonzero_codes(codes.z) + nonzero_codes(codes.w);
            }
        }
        const uint32 column = unit * 2 + c;
        reinterpret_cast<uint8*>(shared.column_scales)[column * 4 + group] = scales[c].code;
    }
    __syncthreads();

    // Eight threads a line; the words of columns of a thread's lines differ by multiples of eight.
    constexpr uint32 kLines = PlainTile::kThreads / 8;
    const uint32 line = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const uint4* const from = stage + line * 8 + (chunk ^ (line / 2 % 8));
    uint8* const codes_to =
        to.codes_t + static_cast<uint64>(column0 + line) * to.rows + row0 + chunk * 16;
    const uint64 stride = static_cast<uint64>(kLines) * to.rows;
#pragma unroll
    for (int i = 0; i < kMxTile / kLines; ++i) {
        *reinterpret_cast<uint4*>(codes_to + i * stride) = from[i * kLines * 8];
    }
    if (threadIdx.x < kMxTile) {
        const uint64 column = column0 + threadIdx.x;
        reinterpret_cast<uint32*>(to.scales_t)[column * (to.rows / kMxTile) + row0 / kMxTile] =
            shared.column_scales[threadIdx.x];
    }
}

// As `mx_quantize_tile`.
template <bool kWide, bool kRow, bool kColumn>
__device__ __forceinline__ void mx_quantize_plain_tile(uint32 row0, uint32 column0,
                                                       const MxTarget& to, uint32* tile,
                                                       MxShared& shared, MxCounters& counters) {
    const uint4* const own = reinterpret_cast<const uint4*>(tile) + threadIdx.x;
    uint32 largest = 0;
    if (kRow) {
        largest = mx_plain_rows<kWide>(own, row0, column0, to, counters);
    } else {
#pragma unroll kMxPlainTogether
        for (int step = 0; step < kMxSteps; ++step) {
            largest = max(largest, mx_magnitude<bf16>(own[step * PlainTile::kThreads]));
        }
    }
    mx_count_pieces<bf16>(own, largest, (kRow ? 1 : 0) + (kColumn ? 1 : 0), counters);
    if (kColumn) {
        __syncthreads();
        mx_plain_columns<kWide>(row0, column0, to, tile, shared, counters);
    }
}
