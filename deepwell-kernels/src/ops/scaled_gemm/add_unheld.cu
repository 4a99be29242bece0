// Completes a GEMM of operands dequantized by dequantize_operands.cu: adds the products with
// elements that BF16 cannot represent ("unheld" elements), in FP32, to the GEMM's result. If every
// element was representable, which is nearly always the case, a warp checks the words of the scale
// tiles of its 128 x 128 results and is done. Otherwise speed does not matter, and each element of
// the result is updated once.
//
// The product of two scales may be outside of FP32's range even if the scaled products are inside:
// the sum of a block is therefore multiplied by two factors of about the square root. Sums run over
// K in ascending order.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/mx_value.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32 kTile = 128;  // rows and columns of a tile of results, as of scale tiles
constexpr uint32 kBlock = 32;  // elements per scale
constexpr uint32 kBlocks = kScaleTileElements / kBlock;

// A row of an operand.
struct Row {
    const uint8* elements;
    const uint8* scales;   // scales of the row's first scale tile
    const uint32* unheld;  // word of the row's first scale tile
};

// A stack of matrices [rows, k].
struct Operand {
    const uint8* elements;
    const uint8* scales;
    const uint32* unheld;
    uint32 rows;

    // Index of the first scale tile, and of its word, that contains row `row` of a matrix.
    __device__ __forceinline__ uint64 first_tile(uint32 matrix, uint32 row, uint32 k) const {
        const uint32 down = (rows + kScaleTileRows - 1) / kScaleTileRows;
        return (static_cast<uint64>(matrix) * down + row / kScaleTileRows) * scale_tiles_across(k);
    }

    __device__ __forceinline__ Row row(uint32 matrix, uint32 row, uint32 k) const {
        const uint64 tile = first_tile(matrix, row, k);
        return Row{elements + (static_cast<uint64>(matrix) * rows + row) * k,
                   scales + tile * kScaleTileBytes + scale_row_place(row % kScaleTileRows),
                   unheld + tile};
    }

    // Whether a word of tiles `from` to `to` along K is set, as far as one lane sees: each lane
    // checks every 32nd word.
    __device__ __forceinline__ bool any(uint32 matrix, uint32 row, uint32 k, uint32 from, uint32 to,
                                        uint32 lane) const {
        const uint32* words = unheld + first_tile(matrix, row, k);
        bool found = false;
        for (uint32 at = from + lane; at < to; at += 32) {
            found |= words[at] != 0;
        }
        return found;
    }
};

// Multiplies a value by 2^(a + b - 254).
__device__ __forceinline__ float scaled(float value, uint32 a, uint32 b) {
    const int32 exponent = static_cast<int32>(a + b) - 254;
    const int32 half = exponent >> 1;
    return value * __uint_as_float(static_cast<uint32>(half + 127) << 23) *
           __uint_as_float(static_cast<uint32>(exponent - half + 127) << 23);
}

// The products of two rows of `k` elements in the blocks `from` to `to` for which one factor is
// unheld.
__device__ __forceinline__ float sum_unheld(const Row& a, const Row& b, uint32 from, uint32 to,
                                            uint32 k) {
    float sum = 0.0f;
    for (uint32 block = from; block < to; ++block) {
        const uint32 tile = block / kBlocks;
        if ((a.unheld[tile] | b.unheld[tile]) == 0) {
            continue;
        }
        const uint32 at = tile * kScaleTileBytes + block % kBlocks;
        const uint32 of_a = a.scales[at], of_b = b.scales[at];
        if ((holds_all(of_a) && holds_all(of_b)) || of_a == 255 || of_b == 255) {
            // No product is missing, or the sum is already NaN.
            continue;
        }
        const uint32 end = min((block + 1) * kBlock, k);
        float of_block = 0.0f;
        for (uint32 i = block * kBlock; i < end; ++i) {
            const uint32 left = a.elements[i], right = b.elements[i];
            if (!is_held(left, of_a) || !is_held(right, of_b)) {
                of_block = fmaf(e4m3_to_f32(left), e4m3_to_f32(right), of_block);
            }
        }
        sum += scaled(of_block, of_a, of_b);
    }
    return sum;
}

__device__ __forceinline__ void add(float* place, float sum) {
    *place += sum;
}

__device__ __forceinline__ void add(bf16* place, float sum) {
    *place = to_bf16(to_f32(*place) + sum);
}

__device__ __forceinline__ uint32 blocks_of(uint32 k) {
    return (k + kBlock - 1) / kBlock;
}

// Processes tiles of 128 x 128 of results [a_rows, b_rows], with one tile per warp at a time;
// several results are processed in order.
struct Tile {
    uint32 result;
    uint32 row;
    uint32 column;
};

template <typename Look, typename Add>
__device__ __forceinline__ void for_tiles(uint32 results, uint32 a_rows, uint32 b_rows, Look look,
                                          Add add_to) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 down = (a_rows + kTile - 1) / kTile, across = (b_rows + kTile - 1) / kTile;
    for (uint32 index = threadIdx.x / 32 * gridDim.x + blockIdx.x; index < results * down * across;
         index += gridDim.x * kWarps) {
        const uint32 within = index % (down * across);
        const Tile tile{index / (down * across), within % down * kTile, within / down * kTile};
        if (__ballot_sync(0xffffffff, look(tile, lane)) == 0) {
            continue;
        }
        for (uint32 at = lane; at < kTile * kTile; at += 32) {
            const uint32 i = tile.row + at / kTile, j = tile.column + at % kTile;
            if (i < a_rows && j < b_rows) {
                add_to(tile, i, j);
            }
        }
    }
}

template <typename Element>
__device__ __forceinline__ void add_unheld(const Operand& a, const Operand& b, Element* out,
                                           uint32 k) {
    const uint32 across = scale_tiles_across(k);
    for_tiles(
        1, a.rows, b.rows,
        [&](const Tile& tile, uint32 lane) {
            return a.any(0, tile.row, k, 0, across, lane) ||
                   b.any(0, tile.column, k, 0, across, lane);
        },
        [&](const Tile&, uint32 i, uint32 j) {
            const float sum = sum_unheld(a.row(0, i, k), b.row(0, j, k), 0, blocks_of(k), k);
            if (sum != 0.0f) {
                add(out + static_cast<uint64>(i) * b.rows + j, sum);
            }
        });
}

#define OPERANDS                                                                                 \
    const uint8 *__restrict__ a, const uint8 *__restrict__ a_scales,                             \
        const uint32 *__restrict__ a_unheld, uint32 a_rows, const uint8 *__restrict__ b,         \
        const uint8 *__restrict__ b_scales, const uint32 *__restrict__ b_unheld, uint32 b_rows

// a [a_rows, k], b [b_rows, k] with scales in tiles and one word per tile; out [a_rows, b_rows].
#define ADD_UNHELD(name, Element)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(OPERANDS, Element* __restrict__ out, uint32 k) {                                    \
        add_unheld(Operand{a, a_scales, a_unheld, a_rows},                                       \
                   Operand{b, b_scales, b_unheld, b_rows}, out, k);                              \
    }

ADD_UNHELD(add_unheld_bf16, bf16)
ADD_UNHELD(add_unheld_f32, float)

// Rows of groups: row i of group g times matrix g of a stack b [groups, b_rows, k]. From the last
// offset on the result is zero, and no product is missing.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_unheld_of_rows_bf16(OPERANDS, bf16* __restrict__ out, uint32 k,
                            const int32* __restrict__ offsets, uint32 groups) {
    const Operand left{a, a_scales, a_unheld, a_rows}, right{b, b_scales, b_unheld, b_rows};
    const uint32 across = scale_tiles_across(k);
    for_tiles(
        1, a_rows, b_rows,
        [&](const Tile& tile, uint32 lane) {
            bool found = left.any(0, tile.row, k, 0, across, lane);
            for (uint32 group = lane; group < groups; group += 32) {
                const uint32 first = offsets[group], end = offsets[group + 1];
                if (first < tile.row + kTile && end > tile.row && first < end) {
                    for (uint32 at = 0; at < across; ++at) {
                        found |= right.any(group, tile.column, k, at, at + 1, 0);
                    }
                }
            }
            return found;
        },
        [&](const Tile&, uint32 i, uint32 j) {
            uint32 group = 0;
            while (group < groups && static_cast<uint32>(offsets[group + 1]) <= i) {
                ++group;
            }
            if (group == groups) {
                return;
            }
            const float sum =
                sum_unheld(left.row(0, i, k), right.row(group, j, k), 0, blocks_of(k), k);
            if (sum != 0.0f) {
                add(out + static_cast<uint64>(i) * b_rows + j, sum);
            }
        });
}

// One result [a_rows, b_rows] per group, over the group's part of K, multiples of 32.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_unheld_of_groups_f32(OPERANDS, float* __restrict__ out, uint32 k,
                             const int32* __restrict__ offsets, uint32 groups) {
    const Operand left{a, a_scales, a_unheld, a_rows}, right{b, b_scales, b_unheld, b_rows};
    for_tiles(
        groups, a_rows, b_rows,
        [&](const Tile& tile, uint32 lane) {
            const uint32 from = offsets[tile.result] / kScaleTileElements;
            const uint32 to = scale_tiles_across(offsets[tile.result + 1]);
            return left.any(0, tile.row, k, from, to, lane) ||
                   right.any(0, tile.column, k, from, to, lane);
        },
        [&](const Tile& tile, uint32 i, uint32 j) {
            const uint32 from = offsets[tile.result] / kBlock;
            const uint32 to = offsets[tile.result + 1] / kBlock;
            const float sum = sum_unheld(left.row(0, i, k), right.row(0, j, k), from, to, k);
            if (sum != 0.0f) {
                const uint64 row = static_cast<uint64>(tile.result) * a_rows + i;
                add(out + row * b_rows + j, sum);
            }
        });
}
