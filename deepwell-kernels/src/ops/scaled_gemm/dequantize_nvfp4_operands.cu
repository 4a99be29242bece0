// Multiplies the elements of both operands of an NVFP4 GEMM by their block scales, for a GEMM in
// BF16. A product has at most six significant bits and an exponent that BF16 has, so none is
// rounded; the tensor scales are factors of the GEMM's sums.
//
// An operand is a stack of matrices [rows, k] of packed elements with scales in tiles, separate for
// each matrix; rows of the target are zero-padded to a multiple of 8. A CTA converts 128 x 128
// elements; the CTAs of the second operand follow those of the first. A thread reads 8 elements of
// a row, next to its neighbors' elements, and writes 16 bytes; all of its loads are issued before
// the first conversion.
//
// architectures: sm_90a
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/nvfp4_block.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr uint32 kTile = 128;
constexpr uint32 kVector = 8;                  // elements per thread
constexpr uint32 kVectors = kTile / kVector;   // per row of a tile
constexpr uint32 kRowsAtOnce = kThreads / kVectors;
constexpr uint32 kVisits = kTile / kRowsAtOnce;
constexpr uint32 kScaleElements = 64;  // elements along K of a tile of scales

struct Operand {
    const uint8* elements;
    const uint8* scales;
    bf16* target;
    uint32 rows;  // rows per matrix
};

// Eight elements times their scale.
__device__ __forceinline__ uint4 convert(uint32 elements, float scale) {
    float values[kVector];
#pragma unroll
    for (uint32 i = 0; i < kVector; ++i) {
        const uint32 code = elements >> (i * 4);
        const float magnitude = fp4_magnitude(code & 7) * scale;
        values[i] = __uint_as_float(__float_as_uint(magnitude) ^ (code >> 3 & 1) << 31);
    }
    return pack_bf16x8(values);
}

__device__ __forceinline__ void dequantize(const Operand& operand, uint32 tile, uint32 k) {
    const uint32 across = (k + kTile - 1) / kTile;
    const uint32 down = (operand.rows + kTile - 1) / kTile;
    const uint64 of_stack = static_cast<uint64>(tile / across / down) * operand.rows;
    const uint32 first_row = tile / across % down * kTile + threadIdx.x / kVectors;
    const uint32 first = tile % across * kTile + threadIdx.x % kVectors * kVector;
    const uint32 width = (k + kVector - 1) / kVector * kVector;
    const uint32 row_bytes = (k + 1) / 2;
    if (first >= k) {
        return;
    }
    const uint32 tiles_along = (k + kScaleElements - 1) / kScaleElements;
    const uint8* const scales =
        operand.scales +
        (static_cast<uint64>(tile / across) * tiles_along + first / kScaleElements) *
            kScaleTileBytes +
        first % kScaleElements / kFp4Block;
    uint32 elements[kVisits], found[kVisits];
#pragma unroll
    for (uint32 visit = 0; visit < kVisits; ++visit) {
        const uint32 row = first_row + visit * kRowsAtOnce;
        elements[visit] = found[visit] = 0;
        if (row < operand.rows) {
            const uint8* const from =
                operand.elements + (of_stack + row) * row_bytes + first / 2;
            found[visit] = scales[scale_row_place(row % kScaleTileRows)];
            if (k % kVector == 0) {
                elements[visit] = *reinterpret_cast<const uint32*>(from);
            } else {
                // Bits behind an odd row's last element are zeros.
#pragma unroll
                for (uint32 byte = 0; byte < kVector / 2; ++byte) {
                    if (first / 2 + byte < row_bytes) {
                        elements[visit] |= static_cast<uint32>(from[byte]) << (byte * 8);
                    }
                }
            }
        }
    }
#pragma unroll
    for (uint32 visit = 0; visit < kVisits; ++visit) {
        const uint32 row = first_row + visit * kRowsAtOnce;
        if (row < operand.rows) {
            uint4 values = convert(elements[visit], ue4m3_to_f32(found[visit]));
            if (first + kVector > k && found[visit] >= kFp4NanScale) {
                // Zeros behind the row stay zeros under a scale that is NaN.
                uint32 words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
                for (uint32 i = 0; i < kVector; ++i) {
                    if (first + i >= k) {
                        words[i / 2] &= i % 2 == 0 ? 0xffff0000u : 0x0000ffffu;
                    }
                }
                values = make_uint4(words[0], words[1], words[2], words[3]);
            }
            *reinterpret_cast<uint4*>(operand.target + (of_stack + row) * width + first) = values;
        }
    }
}

// a and b, stacks of matrices [a_rows, k] and [b_rows, k], 16-byte aligned. One CTA per tile of
// both, of which `a_tiles` are of a.
extern "C" __global__ void __launch_bounds__(kThreads)
    dequantize_nvfp4_operands(const uint8* __restrict__ a, const uint8* __restrict__ a_scales,
                              bf16* __restrict__ a_target, uint32 a_rows, uint32 a_tiles,
                              const uint8* __restrict__ b, const uint8* __restrict__ b_scales,
                              bf16* __restrict__ b_target, uint32 b_rows, uint32 k) {
    if (blockIdx.x < a_tiles) {
        dequantize(Operand{a, a_scales, a_target, a_rows}, blockIdx.x, k);
    } else {
        dequantize(Operand{b, b_scales, b_target, b_rows}, blockIdx.x - a_tiles, k);
    }
}
