// Dequantizes both operands of an MXFP8 GEMM to BF16 matrices, for a GEMM in BF16: E4M3 times a
// power of two. BF16 represents all such values for scales from 2^-124 to 2^119, and most values
// for other scales. A value that BF16 cannot represent (layout/mx_value.cuh) becomes zero and sets
// the word of its scale tile; add_unheld.cu then adds the missing products. No value is rounded.
//
// An operand is a stack of matrices [rows, k] with scales in tiles; rows are zero-padded to a
// multiple of 8. A CTA converts the elements of a scale tile, 128 x 128; the tiles of the second
// operand follow those of the first. A thread reads 8 elements of a row, next to its neighbors'
// elements, and writes 16 bytes; all of its loads are issued before the first conversion. Vectors
// with NaN or a scale at an end of the range, and rows that are not a multiple of 8, are converted
// by element.
//
// architectures: sm_90a
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/mx_value.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr uint32 kVector = 8;                               // elements per thread
constexpr uint32 kVectors = kScaleTileElements / kVector;   // per row of a tile
constexpr uint32 kRowsAtOnce = kThreads / kVectors;
constexpr uint32 kVisits = kScaleTileRows / kRowsAtOnce;
constexpr uint32 kScaleElements = 32;  // elements per scale

struct Operand {
    const uint8* elements;
    const uint8* scales;
    bf16* target;
    uint32* unheld;  // one word per scale tile
    uint32 rows;     // rows per matrix
};

// Whether one of four elements is NaN.
__device__ __forceinline__ bool has_nan(uint32 four) {
    return (((four & 0x7f7f7f7f) + 0x01010101) & 0x80808080) != 0;
}

// Multiplies four elements by 2^120, then by their scale.
__device__ __forceinline__ void convert_four(uint32 four, float scale, float* values) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
        // Places an element into the upper byte of each half. Sign, exponent and fraction then move
        // to the positions of a BF16, whose exponent bias is larger by 120.
        const uint32 upper = __byte_perm(four, 0, pair == 0 ? 0x1404 : 0x3424);
        const uint32 halves = (upper >> 4 & 0x07f007f0) | (upper & 0x80008000);
        values[pair * 2] = low_to_f32(halves) * 0x1p120f * scale;
        values[pair * 2 + 1] = high_to_f32(halves) * 0x1p120f * scale;
    }
}

// Converts eight elements with a scale for which BF16 represents all values.
__device__ __forceinline__ uint4 convert_vector(uint2 elements, uint32 scale) {
    float values[kVector];
    const float factor = e8m0_to_f32(scale);
    convert_four(elements.x, factor, values);
    convert_four(elements.y, factor, values + 4);
    return pack_bf16x8(values);
}

// Converts up to eight elements, one by one, from `first` on, of a row that ends at `k`. Returns
// whether some element is not representable in BF16.
__device__ __forceinline__ bool convert_slowly(const uint8* row, uint32 first, uint32 k,
                                               uint32 scale, bf16* target) {
    bool unheld = false;
#pragma unroll 1
    for (uint32 i = 0; i < kVector; ++i) {
        const uint32 element = first + i < k ? row[first + i] : 0;
        const bool held = is_held(element, scale);
        target[i] = to_bf16(held ? e4m3_to_f32(element) * e8m0_to_f32(scale) : 0.0f);
        unheld |= !held;
    }
    return unheld;
}

__device__ __forceinline__ void dequantize(const Operand& operand, uint32 tile, uint32 k) {
    const uint32 across = scale_tiles_across(k);
    const uint32 down = (operand.rows + kScaleTileRows - 1) / kScaleTileRows;
    const uint32 matrix = tile / across / down;
    const uint32 first_row = tile / across % down * kScaleTileRows + threadIdx.x / kVectors;
    const uint32 within = threadIdx.x % kVectors * kVector;
    const uint32 first = tile % across * kScaleTileElements + within;
    const uint32 width = (k + kVector - 1) / kVector * kVector;
    const uint8* scales = operand.scales + static_cast<uint64>(tile) * kScaleTileBytes +
                          within / kScaleElements;
    const uint64 stack_row = static_cast<uint64>(matrix) * operand.rows + first_row;
    const uint8* from = operand.elements + stack_row * k;
    bf16* target = operand.target + stack_row * width + first;
    // Number of existing rows for this thread.
    uint32 visits = 0;
    if (first < k && first_row < operand.rows) {
        visits = min((operand.rows - first_row + kRowsAtOnce - 1) / kRowsAtOnce, kVisits);
    }
    uint32 slow = (1u << visits) - 1;  // one bit per row
    if (k % kVector == 0) {
        uint2 elements[kVisits];
        uint32 found[kVisits];
#pragma unroll
        for (uint32 visit = 0; visit < kVisits; ++visit) {
            if (visit < visits) {
                const uint32 row = first_row + visit * kRowsAtOnce;
                elements[visit] = *reinterpret_cast<const uint2*>(
                    from + static_cast<uint64>(visit * kRowsAtOnce) * k + first);
                found[visit] = scales[scale_row_place(row % kScaleTileRows)];
            }
        }
#pragma unroll
        for (uint32 visit = 0; visit < kVisits; ++visit) {
            if (visit < visits && holds_all(found[visit]) && found[visit] != 255 &&
                !has_nan(elements[visit].x) && !has_nan(elements[visit].y)) {
                auto* place = reinterpret_cast<uint4*>(
                    target + static_cast<uint64>(visit * kRowsAtOnce) * width);
                *place = convert_vector(elements[visit], found[visit]);
                slow &= ~(1u << visit);
            }
        }
    }
    bool unheld = false;
#pragma unroll 1
    for (uint32 visit = 0; visit < visits; ++visit) {
        if (slow >> visit & 1) {
            const uint64 row = visit * kRowsAtOnce;
            const uint32 place =
                scale_row_place((first_row + visit * kRowsAtOnce) % kScaleTileRows);
            unheld |= convert_slowly(from + row * k, first, k, scales[place],
                                     target + row * width);
        }
    }
    unheld = __syncthreads_or(unheld);
    if (threadIdx.x == 0) {
        operand.unheld[tile] = unheld;
    }
}

// a, a stack of matrices [a_rows, k] with `a_tiles` scale tiles, 16-byte aligned; b likewise. One
// CTA per tile of both.
extern "C" __global__ void __launch_bounds__(kThreads)
    dequantize_operands(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,
                        bf16* __restrict__ a_target, uint32* __restrict__ a_unheld,
                        uint32 a_rows, uint32 a_tiles, const uint8* __restrict__ b,
                        const uint8* __restrict__ b_scales, bf16* __restrict__ b_target,
                        uint32* __restrict__ b_unheld, uint32 b_rows, uint32 k) {
    if (blockIdx.x < a_tiles) {
        dequantize(Operand{a, a_scales, a_target, a_unheld, a_rows}, blockIdx.x, k);
    } else {
        dequantize(Operand{b, b_scales, b_target, b_unheld, b_rows}, blockIdx.x - a_tiles, k);
    }
}
