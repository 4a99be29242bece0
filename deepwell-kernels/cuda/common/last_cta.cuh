// The last CTA of a launch to come by finishes what all CTAs have begun, in one launch and in
// an order that does not depend on timing.
#pragma once

#include "common/types.cuh"

// True in all threads of one CTA: the last of `ctas` to call this with `arrivals`, a counter
// that is zero before the launch and is left zero. What any thread of any CTA wrote to global
// memory before its call is then visible to all threads of that CTA, which read it with
// `__ldcg` (the L1 may hold older lines). All threads of a CTA call it, once.
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
