// Master weights of AdamW in BF16: loads of four, and stores with stochastic rounding, bit by bit
// as in `ops/adamw/bf16.rs`.
#pragma once

#include "common/philox.cuh"
#include "common/types.cuh"

// Loads up to four weights; the others are zero. `w` is aligned to four weights.
__device__ __forceinline__ float4 master_load(const bf16* w, uint64 count) {
    if (count >= 4) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(w);
        return make_float4(low_to_f32(pairs.x), high_to_f32(pairs.x), low_to_f32(pairs.y),
                           high_to_f32(pairs.y));
    }
    return make_float4(count > 0 ? to_f32(w[0]) : 0.0f, count > 1 ? to_f32(w[1]) : 0.0f,
                       count > 2 ? to_f32(w[2]) : 0.0f, 0.0f);
}

// Rounds to a neighbour in BF16, with the probability of the distance to the other neighbour. The
// lower 16 bits of `random` decide; infinities and NaN stay.
__device__ __forceinline__ uint32 master_round(float x, uint32 random) {
    const uint32 bits = __float_as_uint(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        return to_bf16(x).bits;
    }
    return (bits + (random & 0xffffu)) >> 16;
}

// Stores up to four weights. `quad` numbers groups of four elements of a parameter.
__device__ __forceinline__ void master_store(bf16* w, const float4& x, uint64 count, uint64 quad,
                                             uint32 parameter, float step) {
    constexpr uint64 kStream = 1ull << 32;  // moments in eight bits have the streams below
    const uint4 random = philox_words(quad, kStream | parameter, static_cast<uint64>(step));
    const uint32 rounded[4] = {master_round(x.x, random.x), master_round(x.y, random.y),
                               master_round(x.z, random.z), master_round(x.w, random.w)};
    if (count >= 4) {
        *reinterpret_cast<uint2*>(w) =
            make_uint2(rounded[0] | rounded[1] << 16, rounded[2] | rounded[3] << 16);
        return;
    }
#pragma unroll
    for (uint32 i = 0; i < 4; ++i) {
        if (i < count) {
            w[i] = bf16{static_cast<uint16>(rounded[i])};
        }
    }
}
