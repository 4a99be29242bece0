// The arithmetic of a normalization on eight elements, the same wherever it is done.
#pragma once

#include "common/bf16x8.cuh"
#include "common/types.cuh"

// x + delta, rounded once.
__device__ __forceinline__ uint4 add_bf16x8(const uint4& x, const uint4& delta) {
    float a[8], b[8];
    unpack_bf16x8(x, a);
    unpack_bf16x8(delta, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        a[i] += b[i];
    }
    return pack_bf16x8(a);
}

// 1 / sqrt(mean + eps), from the sum of squares.
__device__ __forceinline__ float rms_rstd(float squares, uint32 columns, float eps) {
    const float mean = __fdiv_rn(squares, static_cast<float>(columns));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
}

// x * rstd * weight, rounded once.
__device__ __forceinline__ uint4 rms_normalized(const uint4& x, float rstd, const uint4& weight) {
    float values[8], weights[8];
    unpack_bf16x8(x, values);
    unpack_bf16x8(weight, weights);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = __fmul_rn(__fmul_rn(values[i], rstd), weights[i]);
    }
    return pack_bf16x8(values);
}
