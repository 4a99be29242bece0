// Arithmetic of normalizations on eight elements, shared by all kernels.
#pragma once

#include "common/bf16x8.cuh"
#include "common/row_sum.cuh"
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

// Mean of a row, from its sum.
__device__ __forceinline__ float row_mean(float sum, uint32 columns) {
    return __fdiv_rn(sum, static_cast<float>(columns));
}

// 1 / sqrt(mean + eps), from the sum of squares.
__device__ __forceinline__ float rms_rstd(float squares, uint32 columns, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(row_mean(squares, columns), eps)));
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

// Sum of the distances of eight elements from `origin`.
__device__ __forceinline__ float sum_of_distances(const uint4& x, float origin) {
    float values[8];
    unpack_bf16x8(x, values);
    float sum = __fsub_rn(values[0], origin);
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        sum = __fadd_rn(sum, __fsub_rn(values[i], origin));
    }
    return sum;
}

// Mean of a row, from the sum of distances to its first element. A row far from zero, in particular
// a row of equal numbers, then loses no precision in the sum.
__device__ __forceinline__ float mean_from(float first, float distances, uint32 columns) {
    return __fadd_rn(first, row_mean(distances, columns));
}

// Sum of the squared distances of eight elements to the mean of the row.
__device__ __forceinline__ float sum_of_squared_distances(const uint4& x, float mean) {
    float values[8];
    unpack_bf16x8(x, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        values[i] = __fsub_rn(values[i], mean);
    }
    return sum_of_squares(values);
}

// (x - mean) * rstd * weight + bias, rounded once.
__device__ __forceinline__ uint4 layer_normalized(const uint4& x, float mean, float rstd,
                                                  const uint4& weight, const uint4& bias) {
    float values[8], weights[8], biases[8];
    unpack_bf16x8(x, values);
    unpack_bf16x8(weight, weights);
    unpack_bf16x8(bias, biases);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float normalized = __fmul_rn(__fsub_rn(values[i], mean), rstd);
        values[i] = __fmaf_rn(normalized, weights[i], biases[i]);
    }
    return pack_bf16x8(values);
}
