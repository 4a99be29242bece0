// Special registers by name, where the built-in variables do not do.
#pragma once

#include "common/types.cuh"

// blockIdx.x, read where this stands: what is computed from it here is computed again and not held
// in registers since an earlier use.
__device__ __forceinline__ uint32 block_index_again() {
    uint32 index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
}
