// Element types and the conversions that every kernel uses.
//
// Self-contained: kernels include no header of an installed toolkit, so NVRTC can compile them on a
// machine without one.
#pragma once

using int32 = int;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// A bfloat16 as raw bits: the upper half of an FP32.
struct bf16 {
    uint16 bits;
};

__device__ __forceinline__ float to_f32(bf16 value) {
    return __uint_as_float(static_cast<uint32>(value.bits) << 16);
}

__device__ __forceinline__ float to_f32(float value) {
    return value;
}

// The two BF16 of a word, lower half first.
__device__ __forceinline__ float low_to_f32(uint32 pair) {
    return __uint_as_float(pair << 16);
}

__device__ __forceinline__ float high_to_f32(uint32 pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

// Two FP32 rounded to nearest even, `low` in the lower half.
__device__ __forceinline__ uint32 to_bf16_pair(float low, float high) {
    uint32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ bf16 to_bf16(float value) {
    return bf16{static_cast<uint16>(to_bf16_pair(value, 0.0f))};
}
