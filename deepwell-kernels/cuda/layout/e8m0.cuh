// E8M0 scales: a byte encodes 2^(byte - 127); 255 is NaN.
#pragma once

#include "common/types.cuh"

constexpr uint32 kE8m0One = 127;

__device__ __forceinline__ float e8m0_to_f32(uint32 code) {
    // 2^-127 is subnormal.
    const uint32 bits = code == 0 ? 0x00400000u : code << 23;
    return __uint_as_float(code == 255 ? 0x7fc00000u : bits);
}
