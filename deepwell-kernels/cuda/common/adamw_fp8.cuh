// Moments of AdamW in eight bits, bit by bit as in `deepwell_precision::moments`: blocks of 128
// elements, E4M3 codes and then an FP32 scale that is a power of two. The second moment is stored
// as its square root. A warp has one block, a lane four elements.
#pragma once

#include "common/philox.cuh"
#include "common/types.cuh"

constexpr uint32 kMomentBlock = 128;        // elements
constexpr uint32 kMomentBlockBytes = 132;   // codes and scale
constexpr uint32 kMomentCodeShift = 20;     // bits of FP32 below the last bit of a code
constexpr uint32 kMomentNan = 0x7f;         // code
constexpr int kMomentExponentMin = -100;    // of a scale
constexpr float kMomentRange = 0x1p120f;    // smallest normal E4M3 over smallest normal FP32
constexpr float kMomentRangeReciprocal = 0x1p-120f;

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

__device__ __forceinline__ float moment_decode(uint32 code, float scale) {
    const uint32 magnitude = code & 0x7f;
    const float value = __fmul_rn(__uint_as_float(magnitude << kMomentCodeShift), kMomentRange);
    const uint32 bits = magnitude == kMomentNan ? 0x7fc00000u : __float_as_uint(value);
    return __fmul_rn(__uint_as_float(bits | (code & 0x80) << 24), scale);
}

// Returns the four stored numbers of a lane: first moments, or roots of second moments.
__device__ __forceinline__ float4 moment_decode(const MomentQuad& quad) {
    return make_float4(moment_decode(quad.codes, quad.scale),
                       moment_decode(quad.codes >> 8, quad.scale),
                       moment_decode(quad.codes >> 16, quad.scale),
                       moment_decode(quad.codes >> 24, quad.scale));
}

__device__ __forceinline__ float4 moment_squares(const float4& x) {
    return make_float4(__fmul_rn(x.x, x.x), __fmul_rn(x.y, x.y), __fmul_rn(x.z, x.z),
                       __fmul_rn(x.w, x.w));
}

__device__ __forceinline__ float4 moment_roots(const float4& x) {
    return make_float4(__fsqrt_rn(x.x), __fsqrt_rn(x.y), __fsqrt_rn(x.z), __fsqrt_rn(x.w));
}

// Exponent of the scale of a block with this largest magnitude: 448 is 1.75 * 2^8.
__device__ __forceinline__ int moment_exponent(uint32 largest_bits) {
    const int is_above = (largest_bits & 0x007fffffu) > 0x00600000u;
    return max(static_cast<int>(largest_bits >> 23) - 127 - 8 + is_above, kMomentExponentMin);
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<uint32>(exponent + 127) << 23);
}

// `random` has 16 bits.
__device__ __forceinline__ uint32 moment_encode(float x, float reciprocal, uint32 random) {
    const float shrunk = __fmul_rn(__fmul_rn(fabsf(x), reciprocal), kMomentRangeReciprocal);
    const uint32 rounded = (__float_as_uint(shrunk) + (random << 4)) >> kMomentCodeShift;
    return min(rounded, kMomentNan) | (__float_as_uint(x) >> 24 & 0x80);
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
    const float reciprocal = power_of_two(-exponent);
    const float values[4] = {x.x, x.y, x.z, x.w};
    const uint32 words[4] = {random.x, random.y, random.z, random.w};
    uint32 codes = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32 bits = kIsRoot ? words[i] >> 16 : words[i] & 0xffff;
        uint32 code = moment_encode(values[i], reciprocal, bits);
        if (kIsRoot && code == 0 && values[i] > 0.0f) {
            code = 1;
        }
        codes |= code << (8 * i);
    }
    *reinterpret_cast<uint32*>(block + 4 * lane) = codes;
    if (lane == 0) {
        *reinterpret_cast<float*>(block + kMomentBlock) = power_of_two(exponent);
    }
}

// Stores both moments of a lane's four elements. `quad` numbers groups of four elements of a
// parameter.
__device__ __forceinline__ void moments_store(uint8* first, uint8* second, uint32 lane,
                                              const float4& m, const float4& v, uint64 quad,
                                              uint32 parameter, float step) {
    const uint4 random = philox_words(quad, parameter, static_cast<uint64>(step));
    __syncwarp();  // all lanes have read the scales
    moment_store<false>(first, lane, m, random);
    moment_store<true>(second, lane, moment_roots(v), random);
}
