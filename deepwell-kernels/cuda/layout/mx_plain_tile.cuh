// Quantization as in `layout/mx_tile.cuh`, specialized for the common case in training: BF16, rows
// and columns of whole tiles, the RCEIL rule, groups of 1x32 or 1x128 elements. Produces the same
// data, scales and counters with about a third of the instructions: no checks of flags or edges,
// two elements or two groups per instruction, and no copy of the tile in shared memory.
//
// A thread holds eight rows of eight columns in registers. For the rowwise operand sixteen
// neighbouring threads hold a row. Shuffles reduce the amaxes so that each of four threads ends up
// with two of eight rows, and each scale is computed once. For the columnwise operand the threads
// write the amaxes of their columns to shared memory, each warp computes the scales of sixteen
// columns for all warps, and the data is transposed in shared memory:
//
//   stage[column][chunk ^ (column / 8)]: 8 elements (rows 8 * chunk ...) of one column. Sixteen
//   threads write the same chunk of sixteen columns, eight apart, or eight threads read the
//   sixteen chunks of one column: both are free of bank conflicts.
//
// The scales of a tile also go through shared memory and are written by one warp as 512 contiguous
// bytes. Writing each row's four bytes directly, into sectors shared with other CTAs, cost a tenth
// of the whole kernel on an H200.
//
// Scaling in BF16 gives the same bits as scaling in FP32: a factor is a power of two, so a product
// is exact unless it is less than 2^-126, which becomes zero in E4M3 in any case.
#pragma once

#include "common/types.cuh"
#include "layout/mx_element.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_scale.cuh"
#include "layout/mx_statistics.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fp8.cuh"
#include "ptx/packed.cuh"

constexpr int kMxPlainRows = 8;   // rows, and vectors, per thread
constexpr int kMxPlainWords = 4;  // words of a vector, two columns each
constexpr uint32 kMxRowLanes = 16;
constexpr uint32 kMxPlainThreads = 256;  // per CTA

// The threads of a tile are a whole CTA.
struct MxWholeCta {
    static __device__ __forceinline__ void sync() {
        __syncthreads();
    }
};

// The threads of a tile share a value of `threadIdx.y`; the CTA has several such sets.
struct MxPartOfCta {
    static __device__ __forceinline__ void sync() {
        barrier_sync(1 + threadIdx.y, kMxPlainThreads);
    }
};

// Whether all tiles are plain. A matrix without rows has no tile, although a CTA may be launched.
__device__ __forceinline__ bool mx_is_plain(const MxTarget& to, uint32 flags) {
    return (flags & (kMxFloor | kMxSquare)) == 0 && to.rows >= kMxTile &&
           to.rows % kMxTile == 0 && to.columns % kMxTile == 0;
}

// First row and first column of a thread in a tile.
__device__ __forceinline__ uint32 mx_plain_row() {
    return threadIdx.x / kMxRowLanes * kMxPlainRows;
}
__device__ __forceinline__ uint32 mx_plain_column() {
    return threadIdx.x % kMxRowLanes * 8;
}

// Word `index` of a vector.
__device__ __forceinline__ uint32 word_of(const uint4& vector, int index) {
    return index == 0 ? vector.x : index == 1 ? vector.y : index == 2 ? vector.z : vector.w;
}

// Scale of a group, from the bits of its amax. If `counts`, a clamped scale is counted.
__device__ __forceinline__ MxScale mx_plain_scale(uint32 amax, bool counts, MxCounters& counters) {
    if (!mx_has_normal_scale(amax)) {
        counters.clamps += counts && mx_is_clamped(amax, false);
    }
    return mx_scale(amax, false);
}

// Two scales, one per half of a word: their bytes, and the factors as BF16.
struct MxScalePair {
    uint32 data;
    uint32 factors;
};

// Scales of two groups from their amaxes: `mx_scale` on the upper sixteen bits, as BF16.
__device__ __forceinline__ MxScalePair mx_scale_pair(uint32 amaxes, bool counts,
                                                     MxCounters& counters) {
    const uint32 exponents = ((amaxes + 0x001f001fu) >> 7) & 0x01ff01ffu;
    MxScalePair pair = {exponents - 0x00080008u, (0x01060106u - exponents) << 7};
    // Whether a half is below 2^-118, above 1.875 * 2^127, or not finite.
    const uint32 special = ((amaxes + 0x008f008fu) | ~(amaxes + 0x7b807b80u)) & 0x80008000u;
    if (special != 0) {
        const MxScale low = mx_plain_scale(amaxes << 16, counts, counters);
        const MxScale high = mx_plain_scale(amaxes & 0xffff0000u, counts, counters);
        pair.data = low.code | high.code << 16;
        pair.factors = __byte_perm(__float_as_uint(low.reciprocal),
                                   __float_as_uint(high.reciprocal), 0x7632);
    }
    return pair;
}

// Number of nonzero elements of all vectors.
__device__ __forceinline__ uint32 mx_plain_nonzero(const uint4 (&vectors)[kMxPlainRows]) {
    // Usually all: checking the smallest magnitude takes a quarter of the instructions.
    uint32 smallest[2] = {0x7f7f7f7fu, 0x7f7f7f7fu};
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
#pragma unroll
        for (int w = 0; w < kMxPlainWords; ++w) {
            smallest[w % 2] = min_magnitude_bf16x2(smallest[w % 2], word_of(vectors[row], w));
        }
    }
    constexpr uint32 kMagnitudes = MxElement<bf16>::kMagnitude;
    const uint32 of_all = min_magnitude_bf16x2(smallest[0], smallest[1]) & kMagnitudes;
    if (mx_nonzero_bits<bf16>(of_all) == ~kMagnitudes) {
        return 2 * kMxPlainWords * kMxPlainRows;
    }
    uint32 count = 0;
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
        count += mx_nonzero<bf16>(vectors[row]);
    }
    return count;
}

// Sets the high bit of each nonzero element of a word that underflows to zero.
__device__ __forceinline__ uint32 mx_vanished_bits(uint32 word, uint32 factors) {
    constexpr uint32 kLast = 0x3a80u;  // 2^-10, a tie, goes to zero
    constexpr uint32 kCarry = 0x7fffu - kLast;
    const uint32 scaled = multiply_bf16x2(word, factors) & 0x7fff7fffu;
    return mx_nonzero_bits<bf16>(word) & ~(scaled + (kCarry | kCarry << 16));
}

// Number of elements of a vector that underflow to zero. Not inlined, as `mx_survey`.
__device__ __noinline__ uint32 mx_vanished(uint4 vector, uint4 factors) {
    return __popc(mx_vanished_bits(vector.x, factors.x) |
                  mx_vanished_bits(vector.y, factors.y) >> 1 |
                  mx_vanished_bits(vector.z, factors.z) >> 2 |
                  mx_vanished_bits(vector.w, factors.w) >> 3);
}

// Counts elements that underflow to zero, over sixteen words of quantized data. A single branch
// skips the count for data without zeros; with heavy tails every warp takes the count.
struct MxZeros {
    uint32 nonzero[2] = {0, 0};  // one bit per quantized element, for eight words each
    int words = 0;               // a compile-time constant after unrolling

    __device__ __forceinline__ void see(uint32 data) {
        uint32& of_eight = nonzero[words++ / 8];
        of_eight = of_eight >> 1 | (nonzero_element_bits(data) & 0x80808080u);
    }
    // `factors` are the factors of all vectors, `factors_of(row)` those of one vector.
    template <typename FactorsOf>
    __device__ __forceinline__ void finish(const uint4 (&vectors)[kMxPlainRows],
                                           const uint4& factors, const FactorsOf& factors_of,
                                           MxCounters& counters) const {
        if ((nonzero[0] & nonzero[1]) == 0xffffffffu) {
            return;
        }
        const uint32 carries = (factors.x + 0x00010001u) | (factors.y + 0x00010001u) |
                               (factors.z + 0x00010001u) | (factors.w + 0x00010001u);
        if ((carries & 0x80008000u) == 0) {
            counters.underflows +=
                mx_plain_nonzero(vectors) - __popc(nonzero[0]) - __popc(nonzero[1]);
            return;
        }
        // A factor is NaN, which turns quantized zeros into NaN.
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            counters.underflows += mx_vanished(vectors[row], factors_of(row));
        }
    }
};

// E4M3 data of the lower, or upper, halves of four words.
template <int kHalf>
__device__ __forceinline__ uint32 mx_data_of_halves(uint32 a, uint32 b, uint32 c, uint32 d) {
    return kHalf == 0 ? to_e4m3x4(low_to_f32(a), low_to_f32(b), low_to_f32(c), low_to_f32(d))
                      : to_e4m3x4(high_to_f32(a), high_to_f32(b), high_to_f32(c), high_to_f32(d));
}

// Butterfly step between two threads whose lanes differ by `lanes`: a thread keeps one of two
// values and sends the other. Returns the larger magnitudes of the kept and the received value.
__device__ __forceinline__ uint32 mx_keep_larger(uint32 first, uint32 second, uint32 lanes) {
    const bool keeps_second = threadIdx.x & lanes;
    const uint32 kept = keeps_second ? second : first;
    const uint32 given = keeps_second ? first : second;
    return max_magnitude_bf16x2(kept, __shfl_xor_sync(0xffffffffu, given, lanes));
}

// By a warp: writes a scale tile.
__device__ __forceinline__ void mx_store_scales(uint8* to,
                                                const uint4 (&scales)[kScaleTileBytes / 16]) {
    reinterpret_cast<uint4*>(to)[threadIdx.x % 32] = scales[threadIdx.x % 32];
}

// Quantizes rowwise; leaves the scales in `shared`.
template <bool kWide>
__device__ __forceinline__ void mx_plain_rows(const uint4 (&vectors)[kMxPlainRows], uint32 row0,
                                              uint32 column0, const MxTarget& to,
                                              MxPlainShared& shared, MxCounters& counters) {
    // Each word holds the amaxes of two rows.
    uint32 of_rows[kMxPlainRows / 2];
#pragma unroll
    for (int pair = 0; pair < kMxPlainRows / 2; ++pair) {
        uint32 of_row[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4& vector = vectors[2 * pair + i];
            of_row[i] = max_magnitude_bf16x2(max_magnitude_bf16x2(vector.x, vector.y),
                                             max_magnitude_bf16x2(vector.z, vector.w));
        }
        of_rows[pair] = max_magnitude_bf16x2(__byte_perm(of_row[0], of_row[1], 0x5410),
                                             __byte_perm(of_row[0], of_row[1], 0x7632));
    }
    // Thread q of four ends up with rows 2q and 2q + 1 of eight.
    uint32 amaxes = mx_keep_larger(mx_keep_larger(of_rows[0], of_rows[2], 2),
                                   mx_keep_larger(of_rows[1], of_rows[3], 2), 1);
    if (kWide) {
        amaxes = max_magnitude_bf16x2(amaxes, __shfl_xor_sync(0xffffffffu, amaxes, 4));
        amaxes = max_magnitude_bf16x2(amaxes, __shfl_xor_sync(0xffffffffu, amaxes, 8));
    }
    const uint32 quad = threadIdx.x % kMxRowLanes / 4;  // 32 columns
    const MxScalePair mine =
        mx_scale_pair(amaxes & 0x7fff7fffu, !kWide || quad == 0, counters);
    uint32 factors[kMxPlainRows / 2];
#pragma unroll
    for (int pair = 0; pair < kMxPlainRows / 2; ++pair) {
        factors[pair] = __shfl_sync(0xffffffffu, mine.factors, pair, 4);
    }
    const uint32 row = row0 + mx_plain_row(), column = column0 + mx_plain_column();
    uint8* const data_to = to.data + static_cast<uint64>(row) * to.columns + column;
    const auto factor_of = [&](int row) {
        return __byte_perm(factors[row / 2], factors[row / 2], row % 2 == 0 ? 0x1010 : 0x3232);
    };
    MxZeros zeros;
#pragma unroll
    for (int i = 0; i < kMxPlainRows; ++i) {
        const uint32 factor = factor_of(i);
        uint32 scaled[kMxPlainWords];
#pragma unroll
        for (int w = 0; w < kMxPlainWords; ++w) {
            scaled[w] = multiply_bf16x2(word_of(vectors[i], w), factor);
        }
        uint32 data[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            data[half] =
                to_e4m3x4(low_to_f32(scaled[2 * half]), high_to_f32(scaled[2 * half]),
                          low_to_f32(scaled[2 * half + 1]), high_to_f32(scaled[2 * half + 1]));
        }
        zeros.see(data[0]);
        zeros.see(data[1]);
        *reinterpret_cast<uint2*>(data_to + static_cast<uint64>(i) * to.columns) =
            make_uint2(data[0], data[1]);
    }
    const auto factors_of = [&](int row) {
        const uint32 factor = factor_of(row);
        return make_uint4(factor, factor, factor, factor);
    };
    zeros.finish(vectors, make_uint4(factors[0], factors[1], factors[2], factors[3]), factors_of,
                 counters);
    // The four scale bytes of a row.
    uint32 low = mine.data & 0xff, high = mine.data >> 16;
    if (kWide) {
        low *= 0x01010101u;
        high *= 0x01010101u;
    } else {
        low <<= 8 * quad;
        high <<= 8 * quad;
#pragma unroll
        for (int lanes = 4; lanes < 16; lanes *= 2) {
            low |= __shfl_xor_sync(0xffffffffu, low, lanes);
            high |= __shfl_xor_sync(0xffffffffu, high, lanes);
        }
    }
    if (quad < 2) {
        const uint32 in_tile = mx_plain_row() + threadIdx.x % 4 * 2 + quad;
        reinterpret_cast<uint32*>(shared.scales)[scale_row_place(in_tile) / 4] =
            quad == 0 ? low : high;
    }
}

// Quantizes columnwise, from the amaxes of each warp in `shared.amaxes`, and writes the scales of
// all operands. Counts are tallied before the data is written.
template <bool kWide, bool kRow, typename Threads, typename Tally>
__device__ __forceinline__ void mx_plain_columns(const uint4 (&vectors)[kMxPlainRows],
                                                 uint32 row0, uint32 column0, const MxTarget& to,
                                                 uint4* __restrict__ stage, MxPlainShared& shared,
                                                 Tally& tally, MxCounters& counters) {
    constexpr uint32 kParts = 4;  // threads of a warp that share a word of columns
    const uint32 warp = threadIdx.x / 32, part = threadIdx.x % 32 / 8;
    Threads::sync();
    {
        const uint32 word = warp * 8 + threadIdx.x % 8;
        // The vectors of a warp cover sixteen rows.
        uint32 amaxes = kWide ? max_magnitude_bf16x2(shared.amaxes[part][word],
                                                     shared.amaxes[part + kParts][word])
                              : max_magnitude_bf16x2(shared.amaxes[2 * part][word],
                                                     shared.amaxes[2 * part + 1][word]);
        if (kWide) {
            amaxes = max_magnitude_bf16x2(amaxes, __shfl_xor_sync(0xffffffffu, amaxes, 8));
            amaxes = max_magnitude_bf16x2(amaxes, __shfl_xor_sync(0xffffffffu, amaxes, 16));
        }
        const MxScalePair pair =
            mx_scale_pair(amaxes & 0x7fff7fffu, !kWide || part == 0, counters);
        uint32 low = pair.data & 0xff, high = pair.data >> 16;
        if (kWide) {
            low *= 0x01010101u;
            high *= 0x01010101u;
        } else {
            low <<= 8 * part;
            high <<= 8 * part;
#pragma unroll
            for (int lanes = 8; lanes < 32; lanes *= 2) {
                low |= __shfl_xor_sync(0xffffffffu, low, lanes);
                high |= __shfl_xor_sync(0xffffffffu, high, lanes);
            }
        }
        if (!kWide || part == 0) {
            shared.factors[part][word] = pair.factors;
        }
        if (part < 2) {
            reinterpret_cast<uint32*>(shared.scales_t)[scale_row_place(2 * word + part) / 4] =
                part == 0 ? low : high;
        }
    }
    Threads::sync();
    if (kRow && warp == 0) {
        mx_store_scales(to.scale_tile(row0, column0), shared.scales);
    }
    if (warp == 1) {
        mx_store_scales(to.scale_tile_t(row0, column0), shared.scales_t);
    }

    const uint32 lane = threadIdx.x % kMxRowLanes, chunk = threadIdx.x / kMxRowLanes;
    const uint4 of_group =
        *reinterpret_cast<const uint4*>(&shared.factors[kWide ? 0 : chunk / 4][lane * 4]);
    MxZeros zeros;
    uint2* const to_stage = reinterpret_cast<uint2*>(stage) + lane * 128 + (chunk ^ lane);
#pragma unroll
    for (int w = 0; w < kMxPlainWords; ++w) {
        uint32 scaled[kMxPlainRows];
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            scaled[row] = multiply_bf16x2(word_of(vectors[row], w), word_of(of_group, w));
        }
        const uint2 first =
            make_uint2(mx_data_of_halves<0>(scaled[0], scaled[1], scaled[2], scaled[3]),
                       mx_data_of_halves<0>(scaled[4], scaled[5], scaled[6], scaled[7]));
        const uint2 second =
            make_uint2(mx_data_of_halves<1>(scaled[0], scaled[1], scaled[2], scaled[3]),
                       mx_data_of_halves<1>(scaled[4], scaled[5], scaled[6], scaled[7]));
        zeros.see(first.x);
        zeros.see(first.y);
        zeros.see(second.x);
        zeros.see(second.y);
        to_stage[2 * w * 16] = first;
        to_stage[(2 * w + 1) * 16] = second;
    }
    zeros.finish(vectors, of_group, [&](int) { return of_group; }, counters);
    tally.leave(counters);
    Threads::sync();
    tally.give();

    // Eight threads write a line of 128 bytes. The two chunks of a vector are swapped if column / 8
    // is odd, which is the same for all lines of a warp.
    constexpr uint32 kLines = kMxPlainThreads / 8;
    const uint32 line = threadIdx.x / 8, pair = threadIdx.x % 8;
    const bool reversed = line / 8 % 2 == 1;
    uint8* const data_to =
        to.data_t + static_cast<uint64>(column0 + line) * to.rows + row0 + pair * 16;
#pragma unroll
    for (int i = 0; i < kMxTile / kLines; ++i) {
        const uint32 column = line + i * kLines;
        const uint4 found = stage[column * 8 + (pair ^ (column / 16))];
        *reinterpret_cast<uint4*>(data_to + static_cast<uint64>(i) * kLines * to.rows) =
            reversed ? make_uint4(found.z, found.w, found.x, found.y) : found;
    }
}

// As `mx_quantize_tile`, for vectors in registers: rows from `mx_plain_row` and columns from
// `mx_plain_column` on. `stage` has 16 KiB. Called by all of `Threads`. Counts go to `tally`, an
// `MxTally` or a type with its `leave`, called before the last barrier, and `give`, called after
// it. The next tile may follow without a barrier.
template <bool kWide, bool kRow, bool kColumn, typename Threads = MxWholeCta, typename Tally>
__device__ __forceinline__ void mx_quantize_vectors(const uint4 (&vectors)[kMxPlainRows],
                                                   uint32 row0, uint32 column0,
                                                   const MxTarget& to, uint4* stage,
                                                   MxPlainShared& shared, Tally& tally) {
    MxCounters counters;
    uint32 largest[kMxPlainWords];
#pragma unroll
    for (int w = 0; w < kMxPlainWords; ++w) {
        largest[w] = word_of(vectors[0], w);
#pragma unroll
        for (int row = 1; row < kMxPlainRows; ++row) {
            largest[w] = max_magnitude_bf16x2(largest[w], word_of(vectors[row], w));
        }
    }
    uint32 of_thread = mx_largest<bf16>(
        0x7fff7fffu & max_magnitude_bf16x2(max_magnitude_bf16x2(largest[0], largest[1]),
                                           max_magnitude_bf16x2(largest[2], largest[3])));
    if (of_thread >= kInfinityBits) {
        constexpr uint32 kCopies = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
        of_thread = 0;
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            const uint2 found = mx_survey<bf16>(vectors[row]);
            counters.nonfinite += kCopies * found.x;
            of_thread = max(of_thread, found.y);
        }
    }
    counters.amax = max(counters.amax, of_thread);
    if (kColumn) {
        // Amaxes of the 16 rows of a warp: each of two threads keeps two words.
        const uint2 of_warp = make_uint2(mx_keep_larger(largest[0], largest[2], 16),
                                         mx_keep_larger(largest[1], largest[3], 16));
        const uint32 lane = threadIdx.x % 32;
        *reinterpret_cast<uint2*>(
            &shared.amaxes[threadIdx.x / 32][lane % kMxRowLanes * 4 + lane / kMxRowLanes * 2]) =
            of_warp;
    }
    if (kRow) {
        mx_plain_rows<kWide>(vectors, row0, column0, to, shared, counters);
    }
    if (kColumn) {
        mx_plain_columns<kWide, kRow, Threads>(vectors, row0, column0, to, stage, shared, tally,
                                               counters);
    } else {
        Threads::sync();
        if (threadIdx.x < 32) {
            mx_store_scales(to.scale_tile(row0, column0), shared.scales);
        }
        tally.leave(counters);
        Threads::sync();
        tally.give();
    }
}
