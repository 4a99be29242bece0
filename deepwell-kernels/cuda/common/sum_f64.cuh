// Sum over a CTA in FP64, in an order that is always the same.
#pragma once

#include "common/types.cuh"

// The sum of `value` over all threads of a CTA of kWarps warps, in thread 0; zero in others.
// All threads call it; calls that follow each other need a barrier between them.
template <int kWarps>
__device__ __forceinline__ double sum_over_cta(double value) {
    __shared__ double warp_sums[kWarps];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    if (threadIdx.x % 32 == 0) {
        warp_sums[threadIdx.x / 32] = value;
    }
    __syncthreads();
    double sum = 0.0;
    if (threadIdx.x == 0) {
        for (int warp = 0; warp < kWarps; ++warp) {
            sum += warp_sums[warp];
        }
    }
    return sum;
}
