// Prefix sums over the lanes of a warp.
#pragma once

#include "common/types.cuh"

// Sum of `value` over the lanes up to and including the calling lane. All lanes of a warp call it.
__device__ __forceinline__ uint32 inclusive_sum_of_warp(uint32 value) {
#pragma unroll
    for (uint32 distance = 1; distance < 32; distance *= 2) {
        const uint32 other = __shfl_up_sync(0xffffffffu, value, distance);
        value += threadIdx.x % 32 >= distance ? other : 0;
    }
    return value;
}
