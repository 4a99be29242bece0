// Quantization of a tile of 128 x 128 elements to NVFP4, for the kernels that round to nearest and
// stochastically.
//
// The tile passes through shared memory, since a columnwise operand is stored transposed. A thread
// has four blocks of 16 elements along K; the lanes of a warp have neighboring rows of the operand,
// so that squares of 16 x 16 elements are in half a warp. Data and scales are collected in shared
// memory, too, and stored in rows of 64 bytes and in whole tiles of scales.
#pragma once

#include "common/philox.cuh"
#include "common/types.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/nvfp4_block.cuh"
#include "layout/scale_tile.cuh"

constexpr int kFp4Threads = 256;
constexpr uint32 kFp4Tile = 128;                        // rows and columns
constexpr uint32 kFp4TileBlocks = kFp4Tile / kFp4Block;  // per row
constexpr uint32 kFp4RowBytes = kFp4Tile / 2;
constexpr uint32 kFp4StageRow = kFp4RowBytes + 8;  // bytes: rows begin in different banks
constexpr uint32 kFp4ScaleElements = 64;           // elements along K of a tile of scales

// A row of the tile in shared memory, in elements: an odd number of words.
template <typename E>
constexpr uint32 kFp4TileRow = kFp4Tile + 4 / sizeof(E);

struct Fp4Shared {
    uint8 data[kFp4Tile * kFp4StageRow];
    uint32 scales[2 * kScaleTileBytes / 4];
};

// Random words: none, or those of Philox.
struct Fp4Words {
    uint64 seed;
    uint64 stream;
    uint64 first;   // index of the operand's first element
    uint64 stride;  // words from one row of the operand to the next
};

// An operand: rows [outer, k] of packed elements, and scales in tiles.
struct Fp4Operand {
    uint8* data;
    uint8* scales;
    uint32 outer;
    uint32 k;
};

// Loads the tile at (row0, column0) of x [rows, columns]; elements beyond the matrix are zeros.
template <typename E>
__device__ __forceinline__ void fp4_load_tile(const E* __restrict__ x, uint32 rows, uint32 columns,
                                              uint32 row0, uint32 column0, E* tile) {
    constexpr uint32 kVector = 16 / sizeof(E);
    constexpr uint32 kVectors = kFp4Tile / kVector;  // per row
    constexpr uint32 kSteps = kFp4Tile * kVectors / kFp4Threads;
    if (columns % kVector == 0) {
        constexpr uint32 kAtOnce = 8;
#pragma unroll 1
        for (uint32 step = 0; step < kSteps; step += kAtOnce) {
            uint4 vectors[kAtOnce];
#pragma unroll
            for (uint32 i = 0; i < kAtOnce; ++i) {
                const uint32 at = (step + i) * kFp4Threads + threadIdx.x;
                const uint32 row = row0 + at / kVectors;
                const uint32 column = column0 + at % kVectors * kVector;
                vectors[i] = make_uint4(0, 0, 0, 0);
                if (row < rows && column < columns) {
                    vectors[i] = *reinterpret_cast<const uint4*>(
                        x + static_cast<uint64>(row) * columns + column);
                }
            }
#pragma unroll
            for (uint32 i = 0; i < kAtOnce; ++i) {
                const uint32 at = (step + i) * kFp4Threads + threadIdx.x;
                auto* to = reinterpret_cast<uint32*>(tile + at / kVectors * kFp4TileRow<E> +
                                                     at % kVectors * kVector);
                to[0] = vectors[i].x, to[1] = vectors[i].y;
                to[2] = vectors[i].z, to[3] = vectors[i].w;
            }
        }
        return;
    }
    for (uint32 at = threadIdx.x; at < kFp4Tile * kFp4Tile; at += kFp4Threads) {
        const uint32 row = at / kFp4Tile, column = at % kFp4Tile;
        E value = {};
        if (row0 + row < rows && column0 + column < columns) {
            value = x[static_cast<uint64>(row0 + row) * columns + column0 + column];
        }
        tile[row * kFp4TileRow<E> + column] = value;
    }
}

// The code of an element at its place among eight.
__device__ __forceinline__ uint32 fp4_code_stochastic(float x, float factor, uint32 random,
                                                      uint32 i) {
    const float scaled = __fmul_rn(x, factor);
    return (fp4_stochastic(scaled, random) | fp4_sign(scaled)) << (i % 8 * 4);
}

// The codes of a block that begins at word `index`, a multiple of four if `kAligned`.
template <bool kAligned>
__device__ __forceinline__ uint2 fp4_codes_stochastic(const float (&x)[kFp4Block], float factor,
                                                      const Fp4Words& words, uint64 index) {
    uint32 packed[2] = {0, 0};
    if constexpr (kAligned) {
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; i += 4) {
            const uint4 made = philox_words((index + i) / 4, words.stream, words.seed);
            packed[i / 8] |= fp4_code_stochastic(x[i], factor, made.x, i) |
                             fp4_code_stochastic(x[i + 1], factor, made.y, i + 1) |
                             fp4_code_stochastic(x[i + 2], factor, made.z, i + 2) |
                             fp4_code_stochastic(x[i + 3], factor, made.w, i + 3);
        }
    } else {
        // Where rows are not a multiple of four, blocks begin within a counter's four words.
        uint4 made = make_uint4(0, 0, 0, 0);
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            const uint32 word = (index + i) % 4;
            if (i == 0 || word == 0) {
                made = philox_words((index + i) / 4, words.stream, words.seed);
            }
            const uint32 random = word < 2 ? (word == 0 ? made.x : made.y)
                                           : (word == 2 ? made.z : made.w);
            packed[i / 8] |= fp4_code_stochastic(x[i], factor, random, i);
        }
    }
    return make_uint2(packed[0], packed[1]);
}

// As above, to nearest; counts.
__device__ __forceinline__ uint2 fp4_codes_nearest(const float (&x)[kFp4Block], float factor,
                                                   MxCounters& counters) {
    constexpr uint32 kMaxBits = 0x40c00000u;  // 6
    uint32 packed[2] = {0, 0};
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        const float scaled = __fmul_rn(x[i], factor);
        const uint32 code = fp4_nearest(scaled);
        packed[i / 8] |= (code | fp4_sign(scaled)) << (i % 8 * 4);
        counters.underflows += code == 0 && x[i] != 0.0f ? 1 : 0;
        counters.saturations += (__float_as_uint(scaled) & 0x7fffffffu) > kMaxBits ? 1 : 0;
    }
    return make_uint2(packed[0], packed[1]);
}

// A block with NaN or infinities, or one in a square with such a block: `count` of its elements
// exist. Counts.
__device__ __forceinline__ uint2 fp4_codes_of_nan(const float (&x)[kFp4Block], uint32 count,
                                                  MxCounters& counters) {
    uint32 packed[2] = {0, 0};
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        const uint32 magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
        packed[i / 8] |= i < count ? kFp4NanCode << (i % 8 * 4) : 0;
        counters.amax = max(counters.amax, magnitude < kInfinityBits ? magnitude : 0);
        counters.nonfinite += magnitude >= kInfinityBits ? 1 : 0;
    }
    return make_uint2(packed[0], packed[1]);
}

// Loads a block of the row `outer` of the operand from the tile.
template <typename E, bool kColumn>
__device__ __forceinline__ void fp4_load_block(const E* tile, uint32 outer, uint32 block,
                                               float (&x)[kFp4Block]) {
    const uint32 first = block * kFp4Block;
    if constexpr (kColumn || sizeof(E) == 4) {
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            x[i] = to_f32(kColumn ? tile[(first + i) * kFp4TileRow<E> + outer]
                                  : tile[outer * kFp4TileRow<E> + first + i]);
        }
    } else {
        const auto* words =
            reinterpret_cast<const uint32*>(tile + outer * kFp4TileRow<E> + first);
#pragma unroll
        for (uint32 i = 0; i < kFp4Block / 2; ++i) {
            x[2 * i] = low_to_f32(words[i]);
            x[2 * i + 1] = high_to_f32(words[i]);
        }
    }
}

// Counts the elements of a block that rounding to nearest would change to zero or saturate.
__device__ __forceinline__ void fp4_count_nearest(const float (&x)[kFp4Block], float factor,
                                                  MxCounters& counters) {
    constexpr uint32 kMaxBits = 0x40c00000u;    // 6
    constexpr uint32 kLeastBits = 0x3e800000u;  // 0.25, which ties to zero
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        const uint32 magnitude = __float_as_uint(__fmul_rn(x[i], factor)) & 0x7fffffffu;
        counters.underflows += magnitude <= kLeastBits && x[i] != 0.0f ? 1 : 0;
        counters.saturations += magnitude > kMaxBits ? 1 : 0;
    }
}

// How elements are rounded; random words of aligned rows begin at multiples of four.
enum class Fp4Rounding { kNearest, kStochastic, kStochasticAligned };

// Quantizes the rows of the operand from `outer0` on, along K from `first0` on. Counters are those
// of rounding to nearest.
template <typename E, bool kColumn, Fp4Rounding kRounding>
__device__ __forceinline__ void fp4_quantize_tile(const E* tile, const Fp4Operand& to,
                                                  uint32 outer0, uint32 first0,
                                                  const Fp4Constants& constants,
                                                  const Fp4Words& words, Fp4Shared& shared,
                                                  MxCounters& counters) {
    const uint32 outer = threadIdx.x % kFp4Tile;
    constexpr uint32 kAlong = kFp4Threads / kFp4Tile;  // blocks along K at a time
#pragma unroll 1
    for (uint32 block = threadIdx.x / kFp4Tile; block < kFp4TileBlocks; block += kAlong) {
        float x[kFp4Block];
        fp4_load_block<E, kColumn>(tile, outer, block, x);
        if (constants.flags & kFp4Hadamard) {
            fp4_hadamard(x, constants.flags);
        }
        uint32 largest = fp4_largest(x);
        const uint32 of_row = largest;
        if (constants.flags & kFp4Square) {
#pragma unroll
            for (uint32 distance = 1; distance < kFp4Block; distance *= 2) {
                largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
            }
        }
        const uint32 first = first0 + block * kFp4Block;
        uint32 code = kFp4NanScale;
        uint2 codes;
        if (largest >= kInfinityBits) {
            const uint32 exist = outer0 + outer < to.outer && first < to.k ? to.k - first : 0;
            codes = fp4_codes_of_nan(x, exist, counters);
        } else {
            const Fp4Scale scale = fp4_block_scale(x, __uint_as_float(largest), constants);
            code = scale.code;
            if constexpr (kRounding != Fp4Rounding::kNearest) {
                const uint64 index = words.first +
                                     static_cast<uint64>(outer0 + outer) * words.stride + first;
                constexpr bool kAligned = kRounding == Fp4Rounding::kStochasticAligned;
                codes = fp4_codes_stochastic<kAligned>(x, scale.factor, words, index);
                fp4_count_nearest(x, scale.factor, counters);
            } else {
                codes = fp4_codes_nearest(x, scale.factor, counters);
            }
            counters.amax = max(counters.amax, of_row);
            const bool counts = !(constants.flags & kFp4Square) || outer % kFp4Block == 0;
            counters.clamps += counts && code == 0 && largest != 0 ? 1 : 0;
        }
        *reinterpret_cast<uint2*>(shared.data + outer * kFp4StageRow + block * 8) = codes;
        // A square of which some rows do not exist has no scale for these.
        const bool exists = outer0 + outer < to.outer && first < to.k;
        auto* scales = reinterpret_cast<uint8*>(shared.scales) + block / 4 * kScaleTileBytes +
                       scale_row_place(outer) + block % 4;
        *scales = static_cast<uint8>(exists ? code : 0);
    }
}

// Stores what fp4_quantize_tile left in shared memory; a barrier lies between.
template <bool kScales>
__device__ __forceinline__ void fp4_store_tile(const Fp4Operand& to, uint32 outer0, uint32 first0,
                                               const Fp4Shared& shared) {
    const uint32 row_bytes = (to.k + 1) / 2, first_byte = first0 / 2;
    const uint32 rows = outer0 < to.outer ? min(to.outer - outer0, kFp4Tile) : 0;
    const uint32 bytes = first0 < to.k ? min(row_bytes - first_byte, kFp4RowBytes) : 0;
    uint8* const data = to.data + static_cast<uint64>(outer0) * row_bytes + first_byte;
    if (row_bytes % 8 == 0) {
        for (uint32 at = threadIdx.x; at < kFp4Tile * kFp4RowBytes / 8; at += kFp4Threads) {
            const uint32 row = at / (kFp4RowBytes / 8), byte = at % (kFp4RowBytes / 8) * 8;
            if (row < rows && byte < bytes) {
                *reinterpret_cast<uint2*>(data + static_cast<uint64>(row) * row_bytes + byte) =
                    *reinterpret_cast<const uint2*>(shared.data + row * kFp4StageRow + byte);
            }
        }
    } else {
        for (uint32 at = threadIdx.x; at < kFp4Tile * kFp4RowBytes; at += kFp4Threads) {
            const uint32 row = at / kFp4RowBytes, byte = at % kFp4RowBytes;
            if (row < rows && byte < bytes) {
                data[static_cast<uint64>(row) * row_bytes + byte] =
                    shared.data[row * kFp4StageRow + byte];
            }
        }
    }
    if constexpr (kScales) {
        const uint32 across = (to.k + kFp4ScaleElements - 1) / kFp4ScaleElements;
        const uint32 tile = first0 / kFp4ScaleElements + threadIdx.x / kScaleTileRows;
        if (outer0 < to.outer && tile < across) {
            auto* scales = reinterpret_cast<uint32*>(
                to.scales + (static_cast<uint64>(outer0 / kScaleTileRows) * across + tile) *
                                kScaleTileBytes);
            scales[threadIdx.x % kScaleTileRows] = shared.scales[threadIdx.x];
        }
    }
}
