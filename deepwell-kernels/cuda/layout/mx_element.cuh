// The two source types of quantization, as vectors of 16 bytes and as words of four bytes.
#pragma once

#include "common/types.cuh"
#include "layout/mx_scale.cuh"
#include "ptx/fp8.cuh"
#include "ptx/packed.cuh"

template <typename E>
struct MxElement;

template <>
struct MxElement<bf16> {
    using Bits = uint16;
    static constexpr int kPerWord = 2;
    static constexpr uint32 kMagnitude = 0x7fff7fffu;  // all bits of a word except signs

    // Larger magnitude of each element; NaN is the largest. Signs have no meaning.
    static __device__ __forceinline__ uint32 larger(uint32 a, uint32 b) {
        return max_magnitude_bf16x2(a, b);
    }
    // Bits, as FP32, of element `index` of a word without signs.
    static __device__ __forceinline__ uint32 bits(uint32 word, int index) {
        return index == 0 ? word << 16 : word & 0xffff0000u;
    }
};

template <>
struct MxElement<float> {
    using Bits = uint32;
    static constexpr int kPerWord = 1;
    static constexpr uint32 kMagnitude = 0x7fffffffu;

    static __device__ __forceinline__ uint32 larger(uint32 a, uint32 b) {
        return max(a & kMagnitude, b & kMagnitude);
    }
    static __device__ __forceinline__ uint32 bits(uint32 word, int) {
        return word;
    }
};

template <typename E>
__device__ __forceinline__ float mx_value(uint32 word, int index) {
    return __uint_as_float(MxElement<E>::bits(word, index));
}

// Bits of the largest magnitude in a word without signs.
template <typename E>
__device__ __forceinline__ uint32 mx_largest(uint32 word) {
    const uint32 first = MxElement<E>::bits(word, 0);
    const uint32 last = MxElement<E>::bits(word, MxElement<E>::kPerWord - 1);
    return first > last ? first : last;
}

// Bits of the largest magnitude of a vector; the order is finite, infinity, NaN.
template <typename E>
__device__ __forceinline__ uint32 mx_magnitude(const uint4& vector) {
    using Element = MxElement<E>;
    const uint32 largest = Element::larger(Element::larger(vector.x, vector.y),
                                           Element::larger(vector.z, vector.w));
    return mx_largest<E>(largest & Element::kMagnitude);
}

// Sets the high bit of each nonzero element of a word.
template <typename E>
__device__ __forceinline__ uint32 mx_nonzero_bits(uint32 word) {
    constexpr uint32 kMask = MxElement<E>::kMagnitude;
    return ((word & kMask) + kMask) & ~kMask;
}

// Number of nonzero elements of a vector.
template <typename E>
__device__ __forceinline__ uint32 mx_nonzero(const uint4& vector) {
    return __popc(mx_nonzero_bits<E>(vector.x) | mx_nonzero_bits<E>(vector.y) >> 1 |
                  mx_nonzero_bits<E>(vector.z) >> 2 | mx_nonzero_bits<E>(vector.w) >> 3);
}

// Number of non-finite elements of a vector, and bits of the largest finite magnitude. Passed by
// value, so that a rare call does not move the caller's registers to local memory.
template <typename E>
__device__ __noinline__ uint2 mx_survey(uint4 vector) {
    const uint32 words[4] = {vector.x, vector.y, vector.z, vector.w};
    uint2 found = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < 4 * MxElement<E>::kPerWord; ++i) {
        const uint32 word = words[i / MxElement<E>::kPerWord] & MxElement<E>::kMagnitude;
        const uint32 bits = MxElement<E>::bits(word, i % MxElement<E>::kPerWord);
        if (bits >= kInfinityBits) {
            ++found.x;
        } else {
            found.y = max(found.y, bits);
        }
    }
    return found;
}

// Quantizes four elements, given the reciprocal of their scale.
__device__ __forceinline__ uint32 mx_encode(const float (&x)[4], float reciprocal) {
    return to_e4m3x4(x[0] * reciprocal, x[1] * reciprocal, x[2] * reciprocal, x[3] * reciprocal);
}

// Number of the four elements that exceed the range of their scale, under the floor rule.
__device__ __forceinline__ uint32 mx_saturations(const float (&x)[4], float reciprocal) {
    uint32 count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        count += saturates(x[i], x[i] * reciprocal);
    }
    return count;
}
