// Values of E4M3 elements with E8M0 scales, and whether a BF16 represents them exactly.
//
// BF16 has at least the four significant bits of E4M3, so rounding does not matter; the exponent
// range does. For scales from 2^-124 to 2^119 BF16 represents every element: the smallest, 2^-9,
// becomes 2^-133, the least subnormal of BF16, and the largest, 448, stays below the largest BF16.
#pragma once

#include "common/types.cuh"
#include "layout/e8m0.cuh"

constexpr uint32 kE4m3Nan = 0x7f;  // of either sign
constexpr uint32 kLeastHeldScale = 127 - 124;
constexpr uint32 kLargestHeldScale = 127 + 119;

__device__ __forceinline__ float e4m3_to_f32(uint32 code) {
    const uint32 magnitude = code & 0x7f;
    const uint32 sign = (code & 0x80) << 24;
    // Exponent and fraction are at the positions of an FP32; the biases differ by 120.
    const float scaled = __uint_as_float(sign | magnitude << 20) * 0x1p120f;
    return magnitude == kE4m3Nan ? __uint_as_float(0x7fc00000u) : scaled;
}

// Whether BF16 represents every element with this scale, including a NaN scale.
__device__ __forceinline__ bool holds_all(uint32 scale) {
    return scale - kLeastHeldScale <= kLargestHeldScale - kLeastHeldScale || scale == 255;
}

// Whether BF16 represents an element with its scale.
__device__ __forceinline__ bool is_held(uint32 element, uint32 scale) {
    const uint32 magnitude = element & 0x7f;
    if (holds_all(scale) || magnitude == kE4m3Nan) {
        return true;
    }
    // Exact, or infinite: then all bits of the exponent are ones.
    const float value = e4m3_to_f32(magnitude) * e8m0_to_f32(scale);
    return __float_as_uint(value) < 0x7f800000u && to_f32(to_bf16(value)) == value;
}
