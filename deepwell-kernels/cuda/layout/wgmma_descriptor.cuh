// Shared memory descriptors of wgmma.
#pragma once

#include "common/types.cuh"

// A K-major operand with rows of 128 bytes in the 128-byte swizzle of TMA (16-byte units permuted
// by the row index modulo eight); 1024-byte aligned. To start d bytes further within the 128 bytes,
// add d to `address`.
//
// Bits 0 to 13: address, 16 to 29: "leading" and 32 to 45: "stride" bytes, all in units of 16
// bytes; 62 and 63: swizzle, 1 for 128 bytes. The stride is between groups of eight rows. To start
// further, add the distance, in units, to the descriptor.
constexpr uint32 kMatrixUnit = 16;

__device__ __forceinline__ uint64 wgmma_swizzled_matrix(uint32 address) {
    constexpr uint64 kLeadingBytes = 16;
    constexpr uint64 kStrideBytes = 8 * 128;
    return (address / kMatrixUnit & 0x3fff) | kLeadingBytes / kMatrixUnit << 16 |
           kStrideBytes / kMatrixUnit << 32 | 1ull << 62;
}
