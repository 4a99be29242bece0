// E8M0 scale of a group of elements from its amax, and the counters of quantization. Bit-identical
// to `deepwell-precision`, line by line.
#pragma once

#include "common/types.cuh"

// Flags of the quantization, as passed by the host.
constexpr uint32 kMxFloor = 1;   // scale rule: OCP floor in place of RCEIL
constexpr uint32 kMxWide = 2;    // granularity: 128 in place of 32
constexpr uint32 kMxSquare = 4;  // block: 32x32 (128x128) in place of 1x32 (1x128)

// Special values of scales.
constexpr uint32 kE8m0Nan = 0xff;
constexpr uint32 kE8m0Max = 0xfe;

constexpr uint32 kMagnitudeBits = 0x7fffffffu;
constexpr uint32 kInfinityBits = 0x7f800000u;

struct MxScale {
    uint32 code;       // E8M0
    float reciprocal;  // 2^(127 - code); NaN for NaN
};

// RCEIL is the smallest power of two that is at least amax / 448, divided in FP32. As 448 is 1.75 *
// 2^8, its exponent is the exponent of amax minus 8, plus one if the fraction of amax exceeds 0.75:
// then adding 0.25 minus one ulp to the fraction carries. Subnormal quotients round to multiples of
// 2^-149: the first two constants are the largest amaxes whose quotients round to 2^-127 and to
// 2^-128.
constexpr uint32 kLastOfCodeZero = 0x04600001u;  // 1.75 * 2^-119 and one ulp
constexpr uint32 kLastClamped = 0x03e00003u;     // 1.75 * 2^-120 and three
constexpr uint32 kLastBelowFloor = 0x03ffffffu;  // below 2^-119

// 1.875 * 2^127. With a larger amax an element may round to 2^128, beyond FP32, so the group gets
// the scale of the floor rule, and its elements saturate.
constexpr uint32 kLastOfRange = 0x7f700000u;
constexpr uint32 kLargestOfRange = 254 - 8;  // 2^119

// Whether scale and factor of a group are normal numbers that follow from the exponent alone. Holds
// for nearly all groups, not for clamped scales.
__device__ __forceinline__ bool mx_has_normal_scale(uint32 amax) {
    constexpr uint32 kFirst = 0x04800000u;  // 2^-118
    return amax - kFirst <= kLastOfRange - kFirst;
}

// Scale of a group from the bits of its amax; the order is finite, infinity, NaN.
__device__ __forceinline__ MxScale mx_scale(uint32 amax, bool floor) {
    const uint32 exponent = (amax + (floor ? 0u : 0x001fffffu)) >> 23;
    MxScale scale;
    scale.code = exponent - 8u;
    scale.reciprocal = __uint_as_float((262u - exponent) << 23);
    if (mx_has_normal_scale(amax)) {
        return scale;
    }
    if (amax <= (floor ? kLastBelowFloor : kLastOfCodeZero)) {
        scale.code = 0;
    }
    if (amax > kLastOfRange) {
        scale.code = kLargestOfRange;
    }
    if (amax >= kInfinityBits) {
        scale.code = amax > kInfinityBits ? kE8m0Nan : kE8m0Max;
    }
    // 2^-127, the factor of code 0xfe, is subnormal.
    uint32 bits = (254u - scale.code) << 23;
    bits = scale.code == kE8m0Max ? 0x00400000u : bits;
    scale.reciprocal = __uint_as_float(scale.code == kE8m0Nan ? 0x7fffffffu : bits);
    return scale;
}

// Whether the rule gives less than 2^-127, so that the scale is clamped.
__device__ __forceinline__ bool mx_is_clamped(uint32 amax, bool floor) {
    return amax - 1u < (floor ? kLastBelowFloor : kLastClamped);
}

// Counters of one thread.
struct MxCounters {
    uint32 amax = 0;  // bits of the largest finite magnitude
    uint32 underflows = 0;
    uint32 saturations = 0;
    uint32 clamps = 0;
    uint32 nonfinite = 0;
};

// Sets the high bit of each nonzero quantized element of a word; other bits are undefined.
__device__ __forceinline__ uint32 nonzero_element_bits(uint32 data) {
    return (data & 0x7f7f7f7fu) + 0x7f7f7f7fu;
}

// Whether no element is zero, given the bits of all words combined by AND.
__device__ __forceinline__ bool all_elements_nonzero(uint32 bits) {
    return (bits & 0x80808080u) == 0x80808080u;
}

// Number of nonzero elements among the four of a word.
__device__ __forceinline__ uint32 nonzero_elements(uint32 data) {
    return __popc(nonzero_element_bits(data) & 0x80808080u);
}

// Whether a finite `x` exceeds the largest E4M3 magnitude after scaling.
__device__ __forceinline__ uint32 saturates(float x, float scaled) {
    return (__float_as_uint(x) & kMagnitudeBits) < kInfinityBits && fabsf(scaled) > 448.0f;
}
