// Moments of AdamW in eight bits, bit by bit as in `deepwell_precision::moments`: blocks of 128
// elements, E4M3 codes and then an FP32 scale that is a power of two. The second moment is stored
// as its square root. A warp has one block, a lane four elements.
#pragma once

#include "common/philox.cuh"
#include "common/types.cuh"
#include "ptx/fp8.cuh"

constexpr uint32 kMomentBlock = 128;      // elements
constexpr uint32 kMomentBlockBytes = 132;  // codes and scale
constexpr uint32 kMomentNan = 0x7f;        // code
constexpr int kMomentExponentMin = -100;   // of a scale
// The largest exponent for which the scale's reciprocal and 2^-120 are one normal factor.
constexpr int kMomentExponentPlain = 6;
constexpr float kMomentRangeReciprocal = 0x1p-120f;  // smallest normal FP32 over that of E4M3

// The codes of a lane and the scale of its block.
struct MomentQuad {
    uint32 codes;
    float scale;
};

// Loads a lane's part of a block.
__device__ __forceinline__ MomentQuad moment_load(const uint8* block, uint32 lane) {
    return {*reinterpret_cast<const uint32*>(block + 4 * lane),
            *reinterpret_cast<const float*>(block + kMomentBlock)};
}

// Returns the four stored numbers of a lane: first moments, or roots of second moments.
__device__ __forceinline__ float4 moment_decode(const MomentQuad& quad) {
    const float4 values = from_e4m3x4(quad.codes);
    return make_float4(__fmul_rn(values.x, quad.scale), __fmul_rn(values.y, quad.scale),
                       __fmul_rn(values.z, quad.scale), __fmul_rn(values.w, quad.scale));
}

__device__ __forceinline__ float4 moment_squares(const float4& x) {
    return make_float4(__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y), __fmul_rn(x.z, x.z),
                       __fmul_rn(x.w, x.w));
}

// Exponent of the scale of a block with this largest magnitude: 448 is 1.75 * 2^8.
__device__ __forceinline__ int moment_exponent(uint32 largest_bits) {
    const int is_above = (largest_bits & 0x007fffffu) > 0x00600000u;
    return max(static_cast<int>(largest_bits >> 23) - 127 - 8 + is_above, kMomentExponentMin);
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<uint32>(exponent + 127) << 23);
}

// Sixteen bits of each word, in the middle of a word: those that `moment_codes` adds.
template <bool kUpper>
__device__ __forceinline__ uint32 moment_noise(uint32 random) {
    return __byte_perm(random, 0, kUpper ? 0x4324 : 0x4104);
}

// The upper bytes of four words.
__device__ __forceinline__ uint32 upper_bytes(uint32 a, uint32 b, uint32 c, uint32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

// Codes of magnitudes that a scale takes to at most 448. A code is the upper bits of the FP32
// number that is smaller by 2^-120, here in the upper byte.
template <bool kUpper>
__device__ __forceinline__ uint32 moment_codes(const float4& x, const uint4& random,
                                               float factor) {
    const auto sum = [factor](float value, uint32 word) {
        const float shrunk = __fmul_rn(fabsf(value), factor);
        return __float_as_uint(shrunk) * 16 + moment_noise<kUpper>(word);
    };
    return upper_bytes(sum(x.x, random.x), sum(x.y, random.y), sum(x.z, random.z),
                       sum(x.w, random.w));
}

// The same of any numbers, also of infinities and NaN. Not inlined, as these are rare.
template <bool kUpper>
__device__ __noinline__ uint32 moment_codes_of_any(float4 x, uint4 random, float reciprocal) {
    const auto code = [reciprocal](float value, uint32 word) {
        const float shrunk =
            __fmul_rn(__fmul_rn(fabsf(value), reciprocal), kMomentRangeReciprocal);
        const uint32 noise = moment_noise<kUpper>(word) >> 4;
        return min((__float_as_uint(shrunk) + noise) >> 20, kMomentNan);
    };
    return code(x.x, random.x) | code(x.y, random.y) << 8 | code(x.z, random.z) << 16 |
           code(x.w, random.w) << 24;
}

// Encodes and stores a lane's part of a block. All lanes of the warp take part; `kIsRoot` keeps
// positive numbers positive. The random bits are the lower or upper 16 of each word.
template <bool kIsRoot>
__device__ __forceinline__ void moment_store(uint8* block, uint32 lane, const float4& x,
                                             const uint4& random) {
    constexpr uint32 kMagnitude = 0x7fffffffu;
    const uint32 largest =
        max(max(__float_as_uint(x.x) & kMagnitude, __float_as_uint(x.y) & kMagnitude),
            max(__float_as_uint(x.z) & kMagnitude, __float_as_uint(x.w) & kMagnitude));
    const int exponent = moment_exponent(__reduce_max_sync(0xffffffffu, largest));
    uint32 codes;
    if (exponent <= kMomentExponentPlain) {
        codes = moment_codes<kIsRoot>(x, random, power_of_two(-exponent - 120));
    } else {
        codes = moment_codes_of_any<kIsRoot>(x, random, power_of_two(-exponent));
    }
    if (kIsRoot) {
        const bool has_zero = ((codes - 0x01010101u) & ~codes & 0x80808080u) != 0;
        if (has_zero) {
            codes |= (codes & 0x000000ffu) == 0 && x.x > 0.0f ? 0x00000001u : 0;
            codes |= (codes & 0x0000ff00u) == 0 && x.y > 0.0f ? 0x00000100u : 0;
            codes |= (codes & 0x00ff0000u) == 0 && x.z > 0.0f ? 0x00010000u : 0;
            codes |= (codes & 0xff000000u) == 0 && x.w > 0.0f ? 0x01000000u : 0;
        }
    }
    if (!kIsRoot) {
        codes |= upper_bytes(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                             __float_as_uint(x.w)) &
                 0x80808080u;
    }
    *reinterpret_cast<uint32*>(block + 4 * lane) = codes;
    if (lane == 0) {
        *reinterpret_cast<float*>(block + kMomentBlock) = power_of_two(exponent);
    }
}

// Stores both moments of a lane's four elements, the second by its root. `quad` numbers groups of
// four elements of a parameter.
__device__ __forceinline__ void moments_store(uint8* first, uint8* second, uint32 lane,
                                              const float4& m, const float4& root, uint64 quad,
                                              uint32 parameter, float step) {
    const uint4 random = philox_words(quad, parameter, static_cast<uint64>(step));
    __syncwarp();  // all lanes have read the scales
    moment_store<false>(first, lane, m, random);
    moment_store<true>(second, lane, root, random);
}
