// Unit in which a row of BF16 is read and written: eight elements in 16 bytes, or one element if
// rows are not whole vectors.
#pragma once

#include "common/bf16x8.cuh"
#include "common/types.cuh"

template <bool kVector>
struct Bf16Unit;

template <>
struct Bf16Unit<true> {
    using Bits = uint4;
    static constexpr int kElements = 8;

    static __device__ __forceinline__ uint4 zero() {
        return make_uint4(0, 0, 0, 0);
    }
    static __device__ __forceinline__ void unpack(uint4 bits, float (&values)[8]) {
        unpack_bf16x8(bits, values);
    }
    static __device__ __forceinline__ uint4 pack(const float (&values)[8]) {
        return pack_bf16x8(values);
    }
};

template <>
struct Bf16Unit<false> {
    using Bits = bf16;
    static constexpr int kElements = 1;

    static __device__ __forceinline__ bf16 zero() {
        return bf16{0};
    }
    static __device__ __forceinline__ void unpack(bf16 bits, float (&values)[1]) {
        values[0] = to_f32(bits);
    }
    static __device__ __forceinline__ bf16 pack(const float (&values)[1]) {
        return to_bf16(values[0]);
    }
};
