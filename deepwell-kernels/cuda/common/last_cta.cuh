// The last CTA of a launch to arrive finishes the work of all CTAs, in the same launch and in an
// order independent of timing.
#pragma once

#include "common/types.cuh"

// Returns true in all threads of one CTA: the last of `ctas` CTAs to call this function with
// `arrivals`, a counter that is zero before the launch and is reset to zero. All global writes that
// any CTA made before its call are then visible to all threads of the last CTA, which must read
// them with `__ldcg` (the L1 may hold older lines). All threads of a CTA call the function, once.
__device__ __forceinline__ bool is_last_cta(uint32* arrivals, uint32 ctas) {
    __shared__ uint32 arrived_before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        arrived_before = atomicAdd(arrivals, 1u);
    }
    __syncthreads();
    if (arrived_before != ctas - 1) {
        return false;
    }
    __threadfence();
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        *arrivals = 0;
    }
    return true;
}
