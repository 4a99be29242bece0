// The last block of a launch to come by finishes what all blocks have begun, in one launch and in
// an order that does not depend on timing.
#pragma once

#include "common/types.cuh"

// True in all threads of one block: the last of `blocks` to call this with `arrivals`, a counter
// that is zero before the launch and is left zero. What any thread of any block wrote to global
// memory before its call is then visible to all threads of that block, which read it with
// `__ldcg` (the L1 may hold older lines). All threads of a block call it, once.
__device__ __forceinline__ bool is_last_block(uint32* arrivals, uint32 blocks) {
    __shared__ uint32 arrived_before;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        arrived_before = atomicAdd(arrivals, 1u);
    }
    __syncthreads();
    if (arrived_before != blocks - 1) {
        return false;
    }
    __threadfence();
    if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
        *arrivals = 0;
    }
    return true;
}
