// From the largest magnitude of a group of elements to its E8M0 scale, and what is counted on the
// way. The meaning of every line is that of `deepwell-precision`, to the last bit.
#pragma once

#include "common/types.cuh"

// How elements share exponents, as the host passes it.
constexpr uint32 kMxFloor = 1;   // scale rule: OCP floor in place of RCEIL
constexpr uint32 kMxWide = 2;    // granularity: 128 in place of 32
constexpr uint32 kMxSquare = 4;  // block: 32x32 (128x128) in place of 1x32 (1x128)

// Codes with a meaning of their own.
constexpr uint32 kE8m0Nan = 0xff;
constexpr uint32 kE8m0Max = 0xfe;

constexpr uint32 kMagnitudeBits = 0x7fffffffu;
constexpr uint32 kInfinityBits = 0x7f800000u;

struct MxScale {
    uint32 code;       // E8M0
    float reciprocal;  // 2^(127 - code); NaN for NaN
    bool clamped;      // the rule asked for less than 2^-127, and got that
};

// Scale of a group by the bits of its largest magnitude, NaN above infinity above all else.
//
// RCEIL is the smallest power of two that is not below amax / 448, divided in FP32. As 448 is
// 1.75 * 2^8, that is the exponent of amax less 8, one more when its fraction lies above 0.75:
// adding what 0.75 lacks to one carries then. Quotients that are subnormal round to multiples of
// 2^-149; the two constants are the last amax whose quotient rounds to 2^-127 and to 2^-128.
__device__ __forceinline__ MxScale mx_scale(uint32 amax, bool floor) {
    constexpr uint32 kLastOfCodeZero = 0x04600001u;  // 1.75 * 2^-119 and one ulp
    constexpr uint32 kLastClamped = 0x03e00003u;     // 1.75 * 2^-120 and three
    constexpr uint32 kLastBelowFloor = 0x03ffffffu;  // below 2^-119
    const uint32 carry = floor ? 0u : 0x001fffffu;
    const uint32 last_of_zero = floor ? kLastBelowFloor : kLastOfCodeZero;
    const uint32 last_clamped = floor ? kLastBelowFloor : kLastClamped;
    MxScale scale;
    scale.code = amax <= last_of_zero ? 0u : ((amax + carry) >> 23) - 8u;
    if (amax >= kInfinityBits) {
        scale.code = amax > kInfinityBits ? kE8m0Nan : kE8m0Max;
    }
    // 2^-127, the factor of code 0xfe, is subnormal.
    uint32 bits = (254u - scale.code) << 23;
    bits = scale.code == kE8m0Max ? 0x00400000u : bits;
    scale.reciprocal = __uint_as_float(scale.code == kE8m0Nan ? 0x7fffffffu : bits);
    scale.clamped = amax - 1u < last_clamped;
    return scale;
}

// What one thread saw and did.
struct MxCounters {
    uint32 amax = 0;         // bits of the largest finite magnitude
    int32 underflows = 0;    // of a thread below zero, perhaps: it reads one set of elements and
                             // encodes two
    uint32 saturations = 0;
    uint32 clamps = 0;
    uint32 nonfinite = 0;
};

// How many of the four codes of a word are not zero of either sign.
__device__ __forceinline__ uint32 nonzero_codes(uint32 codes) {
    return __popc(((codes & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u);
}

// The same of two words.
__device__ __forceinline__ uint32 nonzero_codes(uint32 a, uint32 b) {
    const uint32 in_a = ((a & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u;
    const uint32 in_b = ((b & 0x7f7f7f7fu) + 0x7f7f7f7fu) & 0x80808080u;
    return __popc(in_a | in_b >> 1);
}

// Whether a finite `x` exceeds the largest element after scaling.
__device__ __forceinline__ uint32 saturates(float x, float scaled) {
    return (__float_as_uint(x) & kMagnitudeBits) < kInfinityBits && fabsf(scaled) > 448.0f;
}
