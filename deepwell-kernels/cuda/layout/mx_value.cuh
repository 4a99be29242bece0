// What an E4M3 element and an E8M0 scale stand for, and whether a BF16 holds it.
//
// A BF16 has E4M3's four bits of significance, so that rounding is no matter; its exponent is. For
// scales from 2^-124 to 2^119 it holds every element: the smallest, 2^-9, is then 2^-133, its least
// subnormal, and the largest, 448, below its largest number.
#pragma once

#include "common/types.cuh"
#include "layout/e8m0.cuh"

constexpr uint32 kE4m3Nan = 0x7f;  // of either sign
constexpr uint32 kLeastHeldScale = 127 - 124;
constexpr uint32 kLargestHeldScale = 127 + 119;

__device__ __forceinline__ float e4m3_to_f32(uint32 code) {
    const uint32 magnitude = code & 0x7f;
    const uint32 sign = (code & 0x80) << 24;
    // Exponent and fraction lie where those of an FP32 do; the biases differ by 120.
    const float scaled = __uint_as_float(sign | magnitude << 20) * 0x1p120f;
    return magnitude == kE4m3Nan ? __uint_as_float(0x7fc00000u) : scaled;
}

// Whether a BF16 holds every element with this scale; NaN it holds.
__device__ __forceinline__ bool holds_all(uint32 scale) {
    return scale - kLeastHeldScale <= kLargestHeldScale - kLeastHeldScale || scale == 255;
}

// Whether a BF16 holds an element with its scale.
__device__ __forceinline__ bool is_held(uint32 element, uint32 scale) {
    const uint32 magnitude = element & 0x7f;
    if (holds_all(scale) || magnitude == kE4m3Nan) {
        return true;
    }
    // Exact, or infinite: then all bits of the exponent are ones.
    const float value = e4m3_to_f32(magnitude) * e8m0_to_f32(scale);
    return __float_as_uint(value) < 0x7f800000u && to_f32(to_bf16(value)) == value;
}
