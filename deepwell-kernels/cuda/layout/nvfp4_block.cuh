// NVFP4: blocks of 16 E2M1 elements with a UE4M3 scale, and an FP32 scale for the tensor. Every
// operation rounds as in `nvfp4` of `deepwell-precision`, which documents the arithmetic; results
// are equal to the bit. Intrinsics keep the compiler from contracting products and sums.
#pragma once

#include "common/types.cuh"
#include "layout/mx_scale.cuh"
#include "ptx/fp8.cuh"

constexpr uint32 kFp4Block = 16;  // elements that share a scale

// Flags of a format.
constexpr uint32 kFp4Square = 1;         // scales of 16 x 16 elements, not of 16 along K
constexpr uint32 kFp4Bound256 = 2;       // largest block scale 256, not 448
constexpr uint32 kFp4Te = 4;             // order of scale arithmetic: that of Transformer Engine
constexpr uint32 kFp4FourSix = 8;        // selects the scale that maps to 4 or to 6
constexpr uint32 kFp4Hadamard = 16;      // transforms groups of 16 along K
constexpr uint32 kFp4SignsShift = 16;    // the upper half: bit i flips the sign of element i

constexpr uint32 kFloatMaxBits = 0x7f7fffffu;
constexpr uint32 kFp4NanScale = 0x7f;
constexpr uint32 kFp4NanCode = 7;  // every element of a block with NaN or an infinity

// Constants of a tensor.
struct Fp4Constants {
    float encode_scale;
    float decode_scale;  // the tensor scale
    float amax;
    uint32 flags;
};

__device__ __forceinline__ float fp4_bound(uint32 flags) {
    return flags & kFp4Bound256 ? 256.0f : 448.0f;
}

__device__ __forceinline__ Fp4Constants fp4_constants(float amax, uint32 flags) {
    float encode_scale = 1.0f;
    const uint32 magnitude = __float_as_uint(amax) & 0x7fffffffu;
    if (magnitude != 0 && (magnitude < kInfinityBits || !(flags & kFp4Te))) {
        const float finite = __uint_as_float(min(magnitude, kFloatMaxBits));
        const float scale = __fdiv_rn(fp4_bound(flags) * 6.0f, finite);
        encode_scale = __uint_as_float(min(__float_as_uint(scale), kFloatMaxBits));
    }
    return Fp4Constants{encode_scale, __fdiv_rn(1.0f, encode_scale), amax, flags};
}

// The value of a block scale.
__device__ __forceinline__ float ue4m3_to_f32(uint32 code) {
    const float value = __uint_as_float(code << 20) * 0x1p120f;
    return code >= kFp4NanScale ? __uint_as_float(0x7fc00000u) : value;
}

// A block scale and the factor of its elements.
struct Fp4Scale {
    uint32 code;
    float factor;
};

__device__ __forceinline__ Fp4Scale fp4_scale(float wanted, const Fp4Constants& constants) {
    constexpr uint32 kMaxBits = 0x43e00000u;  // 448
    const float bounded = __uint_as_float(min(__float_as_uint(wanted), kMaxBits));
    const uint32 code = to_e4m3x4(bounded, 0.0f, 0.0f, 0.0f) & 0xff;
    float factor = 0.0f;
    if (constants.flags & kFp4Te) {
        factor = __fdiv_rn(1.0f, __fmul_rn(ue4m3_to_f32(code), constants.decode_scale));
    } else if (code != 0) {
        factor = __fdiv_rn(constants.encode_scale, ue4m3_to_f32(code));
    }
    return Fp4Scale{code, __uint_as_float(min(__float_as_uint(factor), kFloatMaxBits))};
}

// A number to which magnitudes are added so that the last bit of the sum is half of their binade:
// the distance of its elements.
__device__ __forceinline__ float fp4_magic(float magnitude) {
    constexpr uint32 kOneBits = 0x3f800000u;  // the smallest normal element
    const uint32 binade = max(__float_as_uint(magnitude), kOneBits) & 0x7f800000u;
    return __uint_as_float(binade + (22u << 23));
}

// The magnitude of a number that is no NaN, at most 6.
__device__ __forceinline__ float fp4_saturated(float scaled) {
    constexpr uint32 kMaxBits = 0x40c00000u;  // 6
    return __uint_as_float(min(__float_as_uint(scaled) & 0x7fffffffu, kMaxBits));
}

// The magnitude bits of an element's code, rounded to nearest even, saturating at 6; `scaled` is no
// NaN.
__device__ __forceinline__ uint32 fp4_nearest(float scaled) {
    const float magnitude = fp4_saturated(scaled), magic = fp4_magic(magnitude);
    return (__float_as_uint(__fadd_rn(magnitude, magic)) + (__float_as_uint(magic) >> 22) + 6) & 7;
}

// The value of the same element.
__device__ __forceinline__ float fp4_nearest_value(float scaled) {
    const float magnitude = fp4_saturated(scaled), magic = fp4_magic(magnitude);
    const float value = __fsub_rn(__fadd_rn(magnitude, magic), magic);
    return __uint_as_float(__float_as_uint(value) | (__float_as_uint(scaled) & 0x80000000u));
}

// As fp4_nearest, but away from zero if the fraction of the distance to the next element, in units
// of 2^-32, exceeds `word`.
__device__ __forceinline__ uint32 fp4_stochastic(float scaled, uint32 word) {
    constexpr uint32 kMaxBits = 0x40c00000u;  // 6
    constexpr uint32 kShift = 22;  // bits of an FP32 fraction beyond those of E2M1
    constexpr uint32 kLeast = 127;  // exponent field of the smallest normal element
    const uint32 magnitude = min(__float_as_uint(scaled) & 0x7fffffffu, kMaxBits);
    const uint32 exponent = max(magnitude >> 23, kLeast);
    const uint32 below = exponent - (magnitude >> 23);
    // A subnormal FP32 gets a false implicit bit, far below all 32 bits of `share`.
    const uint32 significand = (magnitude & 0x007fffffu) | 0x00800000u;
    const uint32 units = significand >> min(kShift + below, 31u);
    constexpr uint32 kUp = 32 - kShift;
    const uint32 shifted = significand << (kUp - min(below, kUp));
    const uint32 share = shifted >> min(below - min(below, kUp), 31u);
    return ((exponent - kLeast) << 1) + units + (share > word ? 1u : 0u);
}

__device__ __forceinline__ uint32 fp4_sign(float scaled) {
    return __float_as_uint(scaled) >> 31 << 3;
}

// The value of the magnitude bits of an element.
__device__ __forceinline__ float fp4_magnitude(uint32 code) {
    return __uint_as_float(code << 22) * 0x1p126f;
}

__device__ __forceinline__ void fp4_change_signs(float (&x)[kFp4Block], uint32 flags) {
    const uint32 signs = flags >> kFp4SignsShift;
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        x[i] = __uint_as_float(__float_as_uint(x[i]) ^ (signs >> i & 1) << 31);
    }
}

// Sums over distances 1, 2, 4, 8, and a division by 4: the transform without signs, which is its
// own inverse.
__device__ __forceinline__ void fp4_butterfly(float (&x)[kFp4Block]) {
#pragma unroll
    for (uint32 distance = 1; distance < kFp4Block; distance *= 2) {
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            if ((i & distance) == 0) {
                const float a = x[i], b = x[i + distance];
                x[i] = __fadd_rn(a, b);
                x[i + distance] = __fsub_rn(a, b);
            }
        }
    }
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        x[i] = __fmul_rn(x[i], 0.25f);
    }
}

// The transform of a group and its rounding to BF16.
__device__ __forceinline__ void fp4_hadamard(float (&x)[kFp4Block], uint32 flags) {
    fp4_change_signs(x, flags);
    fp4_butterfly(x);
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; i += 2) {
        // The sum with zero makes a negative zero positive, as in an accumulator.
        const uint32 pair = to_bf16_pair(__fadd_rn(x[i], 0.0f), __fadd_rn(x[i + 1], 0.0f));
        x[i] = low_to_f32(pair);
        x[i + 1] = high_to_f32(pair);
    }
}

// Bits of the largest magnitude of a block, in the order finite, infinity, NaN.
__device__ __forceinline__ uint32 fp4_largest(const float (&x)[kFp4Block]) {
    uint32 largest = 0;
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    }
    return largest;
}

// x / (6 * bound). Where no step leaves the range of normal numbers, `kMultiplies`, a product with
// the reciprocal and one correction give the rounded quotient: so it is for all significands of
// both bounds, tried one by one.
template <bool kMultiplies>
__device__ __forceinline__ float fp4_by_largest(float x, uint32 flags) {
    const float largest = fp4_bound(flags) * 6.0f;
    if constexpr (kMultiplies) {
        const float reciprocal = flags & kFp4Bound256 ? 1.0f / 1536.0f : 1.0f / 2688.0f;
        const float quotient = __fmul_rn(x, reciprocal);
        return __fmaf_rn(__fmaf_rn(-quotient, largest, x), reciprocal, quotient);
    } else {
        return __fdiv_rn(x, largest);
    }
}

// Sum of squared errors of a block, in the order of the elements.
template <bool kMultiplies>
__device__ __forceinline__ float fp4_error(const float (&x)[kFp4Block], const Fp4Scale& scale,
                                           const Fp4Constants& constants) {
    const float value = ue4m3_to_f32(scale.code);
    float sum = 0.0f;
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        const float element = fp4_nearest_value(__fmul_rn(x[i], scale.factor));
        const float product = __fmul_rn(__fmul_rn(element, value), constants.amax);
        const float difference =
            __fsub_rn(fp4_by_largest<kMultiplies>(product, constants.flags), x[i]);
        sum = __fadd_rn(sum, __fmul_rn(difference, difference));
    }
    return sum;
}

// The scale that maps the largest magnitude of a block to 4 or to 6.
template <bool kMultiplies>
__device__ __forceinline__ Fp4Scale fp4_four_or_six(const float (&x)[kFp4Block],
                                                    const Fp4Scale& four, const Fp4Scale& six,
                                                    const Fp4Constants& constants) {
    const float of_four = fp4_error<kMultiplies>(x, four, constants);
    // Ties keep 6, and so does an error that is not a number.
    return of_four < fp4_error<kMultiplies>(x, six, constants) ? four : six;
}

// The scale of a block with this largest finite magnitude; `x` is the block, for the selection of 4
// or 6.
__device__ __forceinline__ Fp4Scale fp4_block_scale(const float (&x)[kFp4Block], float largest,
                                                    const Fp4Constants& constants) {
    const bool selects = constants.flags & kFp4FourSix;
    if ((constants.flags & kFp4Te) && !selects) {
        const float sixth = __fmul_rn(constants.encode_scale, 1.0f / 6.0f);
        return fp4_scale(__fmul_rn(largest, sixth), constants);
    }
    const float base = __fmul_rn(__fdiv_rn(largest, 6.0f), constants.encode_scale);
    const Fp4Scale six = fp4_scale(base, constants);
    if (!selects) {
        return six;
    }
    const Fp4Scale four = fp4_scale(__fmul_rn(base, 1.5f), constants);
    // 2^-60 to 2^60, beside elements times scales of 2^-10 to 2^12.
    const uint32 above = (__float_as_uint(constants.amax) & 0x7fffffffu) - (67u << 23);
    return above < 120u << 23 ? fp4_four_or_six<true>(x, four, six, constants)
                              : fp4_four_or_six<false>(x, four, six, constants);
}
