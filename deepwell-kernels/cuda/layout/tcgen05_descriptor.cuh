// Shared memory and instruction descriptors of tcgen05.
#pragma once

#include "common/types.cuh"

// Bits 0 to 13: address, 16 to 29: "leading" and 32 to 45: "stride" bytes, all in units of 16
// bytes; 46: one; 61 to 63: swizzle. Of a K-major matrix, the leading bytes are between
// neighbors along K and the stride is between groups of eight rows; of an MN-major one, the
// leading bytes are between row groups as wide as the swizzle, the stride between groups of eight
// along K.
__device__ __forceinline__ uint64 tcgen05_matrix(uint32 address, uint32 leading_bytes,
                                                 uint32 stride_bytes, uint64 swizzle) {
    return (address >> 4 & 0x3fff) | static_cast<uint64>(leading_bytes >> 4) << 16 |
           static_cast<uint64>(stride_bytes >> 4) << 32 | 1ull << 46 | swizzle << 61;
}

// Rows of 128 bytes in the 128-byte swizzle of TMA (16-byte units permuted by the row index modulo
// eight); 1024-byte aligned. To start d bytes further within the 128 bytes, add d to `address`.
__device__ __forceinline__ uint64 tcgen05_swizzled_matrix(uint32 address) {
    return tcgen05_matrix(address, 16, 1024, 2);
}

// An MN-major matrix of two-byte elements: boxes of 64 rows (128 bytes, swizzled as above) and 64
// along K (or `box_bytes` / 128), stored contiguously; 1024-byte aligned. To start d further along
// K, in multiples of eight, add 128 d to `address`.
constexpr uint32 kTransposedBoxBytes = 64 * 128;

__device__ __forceinline__ uint64 tcgen05_transposed_matrix(
    uint32 address, uint32 box_bytes = kTransposedBoxBytes) {
    return tcgen05_matrix(address, box_bytes, 1024, 2);
}

// Descriptors of matrices at multiples of 16 bytes from a first one: one addition each.
struct Tcgen05Matrices {
    uint32 low;
    uint32 high;

    __device__ __forceinline__ explicit Tcgen05Matrices(uint64 first)
        : low(static_cast<uint32>(first)), high(static_cast<uint32>(first >> 32)) {}

    // The matrix `bytes` further, within the 256 KiB of addresses.
    __device__ __forceinline__ uint64 at(uint32 bytes) const {
        uint64 matrix;
        asm("mov.b64 %0, {%1, %2};" : "=l"(matrix) : "r"(low + (bytes >> 4)), "r"(high));
        return matrix;
    }
};

// Four scales of each of 128 rows, for 128 elements of MXFP8 or 64 of NVFP4 along K: 32 rows of 16
// contiguous bytes; row r has four scales each of rows r, 32 + r, 64 + r and 96 + r.
__device__ __forceinline__ uint64 tcgen05_scale_tile(uint32 address) {
    return tcgen05_matrix(address, 128, 128, 0);
}

// An MMA of E4M3 data with E8M0 scales, both operands K-major, of `rows` (128 or 256) by `columns`;
// uses scale `step` of the four scales of a row.
__host__ __device__ constexpr uint32 tcgen05_mxf8_instruction(uint32 rows, uint32 columns,
                                                              uint32 step) {
    return step << 4 | columns >> 3 << 17 | 1u << 23 | rows >> 7 << 27 | step << 29;
}

// An MMA of E2M1 data with UE4M3 scales, both operands K-major, of `rows` (128 or 256) by
// `columns`; uses the four scales of a row.
__host__ __device__ constexpr uint32 tcgen05_nvf4_instruction(uint32 rows, uint32 columns) {
    return 1u << 7 | 1u << 10 | columns >> 3 << 17 | rows >> 7 << 27;
}

// An MMA of BF16 to FP32, of `rows` (128 or 256) by `columns`; operands are K-major or
// MN-major.
__host__ __device__ constexpr uint32 tcgen05_bf16_instruction(uint32 rows, uint32 columns,
                                                              bool a_k_major, bool b_k_major) {
    return 1u << 4 | 1u << 7 | 1u << 10 | (a_k_major ? 0u : 1u << 15) |
           (b_k_major ? 0u : 1u << 16) | columns >> 3 << 17 | rows >> 4 << 24;
}
