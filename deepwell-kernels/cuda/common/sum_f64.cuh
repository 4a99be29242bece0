// Sum over a CTA in FP64, in a fixed order.
#pragma once

#include "common/types.cuh"

// Sum of `value` over all threads of a CTA of kWarps warps, returned in thread 0; zero in other
// threads. All threads call the function; consecutive calls need a barrier between them.
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
