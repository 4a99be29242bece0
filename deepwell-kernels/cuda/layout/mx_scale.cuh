// From the largest magnitude of a group of elements to its E8M0 scale, and what is counted on the
// way. The meaning of every line is that of `deepwell-precision`, to the last bit.
#pragma once

#include "common/types.cuh"

// How elements share exponents, as the host passes it.
constexpr uint32 kMxFloor = 1;   // scale rule: OCP floor in place of RCEIL
constexpr uint32 kMxWide = 2;    // granularity: 128 in place of 32
constexpr uint32 kMxSquare = 4;  // block: 32x32 (128x128) in place of 1x32 (1x128)

// Scales with a meaning of their own.
constexpr uint32 kE8m0Nan = 0xff;
constexpr uint32 kE8m0Max = 0xfe;

constexpr uint32 kMagnitudeBits = 0x7fffffffu;
constexpr uint32 kInfinityBits = 0x7f800000u;

struct MxScale {
    uint32 code;       // E8M0
    float reciprocal;  // 2^(127 - code); NaN for NaN
};

// RCEIL is the smallest power of two that is not below amax / 448, divided in FP32. As 448 is
// 1.75 * 2^8, that is the exponent of amax less 8, one more when its fraction lies above 0.75:
// adding what 0.75 lacks to one carries then. Quotients that are subnormal round to multiples of
// 2^-149: these are the last amax whose quotient rounds to 2^-127 and to 2^-128.
constexpr uint32 kLastOfCodeZero = 0x04600001u;  // 1.75 * 2^-119 and one ulp
constexpr uint32 kLastClamped = 0x03e00003u;     // 1.75 * 2^-120 and three
constexpr uint32 kLastBelowFloor = 0x03ffffffu;  // below 2^-119

// 1.875 * 2^127, the last amax whose elements do not round to 2^128, which FP32 does not hold. A
// group above it gets the scale of the floor rule, under which its elements saturate.
constexpr uint32 kLastOfRange = 0x7f700000u;
constexpr uint32 kLargestOfRange = 254 - 8;  // 2^119

// Whether a group's scale and its factor are normal numbers and follow from the exponent alone, as
// nearly all do; those of a clamped scale do not.
__device__ __forceinline__ bool mx_has_normal_scale(uint32 amax) {
    constexpr uint32 kFirst = 0x04800000u;  // 2^-118
    return amax - kFirst <= kLastOfRange - kFirst;
}

// Scale of a group by the bits of its largest magnitude, NaN above infinity above all else.
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

// Whether the rule asked for less than 2^-127, and got that.
__device__ __forceinline__ bool mx_is_clamped(uint32 amax, bool floor) {
    return amax - 1u < (floor ? kLastBelowFloor : kLastClamped);
}

// What one thread saw and did.
struct MxCounters {
    uint32 amax = 0;  // bits of the largest finite magnitude
    uint32 underflows = 0;
    uint32 saturations = 0;
    uint32 clamps = 0;
    uint32 nonfinite = 0;
};

// The high bit of each code of a word that is not zero of either sign, among others.
__device__ __forceinline__ uint32 nonzero_element_bits(uint32 data) {
    return (data & 0x7f7f7f7fu) + 0x7f7f7f7fu;
}

// Whether no element is zero, from all their bits.
__device__ __forceinline__ bool all_elements_nonzero(uint32 bits) {
    return (bits & 0x80808080u) == 0x80808080u;
}

// How many of the four elements of a word are not zero.
__device__ __forceinline__ uint32 nonzero_elements(uint32 data) {
    return __popc(nonzero_element_bits(data) & 0x80808080u);
}

// Whether a finite `x` exceeds the largest element after scaling.
__device__ __forceinline__ uint32 saturates(float x, float scaled) {
    return (__float_as_uint(x) & kMagnitudeBits) < kInfinityBits && fabsf(scaled) > 448.0f;
}
