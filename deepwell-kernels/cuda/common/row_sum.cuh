// Sums over a row of eight-element vectors, in one fixed order for every distribution of the row
// over threads: a tree over the vectors of 128 elements (a slice), then slices l, l + 32, l + 64,
// ... for each l, then a tree over the 32 sums. Kernels that split rows differently thus give the
// same bits.
#pragma once

#include "common/types.cuh"

// Elements of a slice, and the number of 16-byte vectors of BF16 in a slice.
constexpr uint32 kSlice = 128;
constexpr uint32 kSliceVectors = 16;

// Sum over 16 neighbouring lanes, returned in each lane.
__device__ __forceinline__ float sum_of_16_lanes(float value) {
#pragma unroll
    for (int lanes = 1; lanes < 16; lanes *= 2) {
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, lanes));
    }
    return value;
}

// Sum over a warp, returned in each lane.
__device__ __forceinline__ float sum_of_warp(float value) {
    value = sum_of_16_lanes(value);
    return __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, 16));
}

// Sum of the `slices` slice sums of a row, given by `slice_sum(index)`, returned in each lane of a
// warp.
template <typename SliceSum>
__device__ __forceinline__ float sum_of_slices(uint32 slices, const SliceSum& slice_sum) {
    float sum = 0.0f;
    for (uint32 slice = threadIdx.x % 32; slice < slices; slice += 32) {
        sum = __fadd_rn(sum, slice_sum(slice));
    }
    return sum_of_warp(sum);
}

// Sum of the squares of eight elements.
__device__ __forceinline__ float sum_of_squares(const float (&x)[8]) {
    float sum = __fmul_rn(x[0], x[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        sum = __fmaf_rn(x[i], x[i], sum);
    }
    return sum;
}

// Sum of products of eight elements.
__device__ __forceinline__ float sum_of_products(const float (&x)[8], const float (&y)[8]) {
    float sum = __fmul_rn(x[0], y[0]);
#pragma unroll
    for (int i = 1; i < 8; ++i) {
        sum = __fmaf_rn(x[i], y[i], sum);
    }
    return sum;
}

// Sum over a CTA of `kThreads` threads, returned in each thread.
template <int kThreads>
__device__ __forceinline__ float sum_of_cta(float value) {
    __shared__ float of_warps[kThreads / 32];
    value = sum_of_warp(value);
    // All threads have read the sums of the previous call.
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float sum = of_warps[0];
#pragma unroll
    for (int warp = 1; warp < kThreads / 32; ++warp) {
        sum += of_warps[warp];
    }
    return sum;
}
