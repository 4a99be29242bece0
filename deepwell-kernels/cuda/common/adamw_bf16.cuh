// Master weights of AdamW in BF16: loads of four, and stores with stochastic rounding, bit by bit
// as in `ops/adamw/bf16.rs`.
#pragma once

#include "common/philox.cuh"
#include "common/types.cuh"

// Loads up to four weights; the others are zero. `w` is aligned to four weights.
__device__ __forceinline__ uint2 master_load(const bf16* w, uint64 count) {
    if (count >= 4) {
        return *reinterpret_cast<const uint2*>(w);
    }
    const uint32 bits[3] = {count > 0 ? w[0].bits : 0u, count > 1 ? w[1].bits : 0u,
                            count > 2 ? w[2].bits : 0u};
    return make_uint2(bits[0] | bits[1] << 16, bits[2]);
}

__device__ __forceinline__ float4 master_widen(const uint2& pairs) {
    return make_float4(low_to_f32(pairs.x), high_to_f32(pairs.x), low_to_f32(pairs.y),
                       high_to_f32(pairs.y));
}

// Rounds to neighbours in BF16, with the probability of the distance to the other neighbour. The
// lower 16 bits of random words decide; infinities and NaN stay.
__device__ __forceinline__ uint32 master_round(float x, uint32 random) {
    const uint32 bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        return to_bf16(x).bits;
    }
    return (bits + (random & 0xffffu)) >> 16;
}

__device__ __forceinline__ uint2 master_round(const float4& x, const uint4& random) {
    constexpr uint32 kInfinity = 0xff000000u;  // twice the bits; more are those of NaN
    const uint32 bits[4] = {__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z),
                            __float_as_uint(x.w)};
    if (max(max(2 * bits[0], 2 * bits[1]), max(2 * bits[2], 2 * bits[3])) > kInfinity) {
        return make_uint2(master_round(x.x, random.x) | master_round(x.y, random.y) << 16,
                          master_round(x.z, random.z) | master_round(x.w, random.w) << 16);
    }
    return make_uint2(__byte_perm(bits[0] + (random.x & 0xffffu),
                                  bits[1] + (random.y & 0xffffu), 0x7632),
                      __byte_perm(bits[2] + (random.z & 0xffffu),
                                  bits[3] + (random.w & 0xffffu), 0x7632));
}

// Random words of four weights. `quad` numbers groups of four elements of a parameter.
__device__ __forceinline__ uint4 master_words(uint64 quad, uint32 parameter, float step) {
    constexpr uint64 kStream = 1ull << 32;  // moments in eight bits have the streams below
    return philox_words(quad, kStream | parameter, static_cast<uint64>(step));
}

// Stores up to four weights.
__device__ __forceinline__ void master_store(bf16* w, const float4& x, uint64 count, uint64 quad,
                                             uint32 parameter, float step) {
    const uint2 rounded = master_round(x, master_words(quad, parameter, step));
    if (count >= 4) {
        *reinterpret_cast<uint2*>(w) = rounded;
        return;
    }
    const uint32 last[3] = {rounded.x & 0xffffu, rounded.x >> 16, rounded.y & 0xffffu};
#pragma unroll
    for (uint32 i = 0; i < 3; ++i) {
        if (i < count) {
            w[i] = bf16{static_cast<uint16>(last[i])};
        }
    }
}
