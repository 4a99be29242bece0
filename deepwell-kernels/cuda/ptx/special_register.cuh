// Special registers, for uses that the built-in variables do not serve.
#pragma once

#include "common/types.cuh"

// blockIdx.x, read at the call: expressions of it are recomputed here instead of being kept in
// registers since an earlier use.
__device__ __forceinline__ uint32 block_index_again() {
    uint32 index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}

// threadIdx.x, read at the call.
__device__ __forceinline__ uint32 thread_index_again() {
    uint32 index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
}
