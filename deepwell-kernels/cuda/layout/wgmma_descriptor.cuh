// How operands lie in shared memory, in the words that wgmma takes.
#pragma once

#include "common/types.cuh"

// A K-major operand of rows of 128 bytes whose 16-byte units are exchanged by the row's number
// modulo eight, as tensor copies with a swizzle of 128 bytes leave them; 1024-byte aligned. What
// lies d bytes deeper within the 128 has an `address` that is larger by d.
//
// Bits 0 to 13: address, 16 to 29: "leading" and 32 to 45: "stride" bytes, all in units of 16
// bytes; 62 and 63: swizzle, 1 for 128 bytes. The stride is between groups of eight rows. What lies
// further on has a descriptor that is larger by the distance in units.
constexpr uint32 kMatrixUnit = 16;

__device__ __forceinline__ uint64 wgmma_swizzled_matrix(uint32 address) {
    constexpr uint64 kLeadingBytes = 16;
    constexpr uint64 kStrideBytes = 8 * 128;
    return (address / kMatrixUnit & 0x3fff) | kLeadingBytes / kMatrixUnit << 16 |
           kStrideBytes / kMatrixUnit << 32 | 1ull << 62;
}
