// Release and acquire operations on counters in global memory, for signals between CTAs.
#pragma once

#include "common/types.cuh"

// Adds to a counter with release semantics: writes that this thread made or observed are visible to
// threads that then read the counter by `load_acquire`.
__device__ __forceinline__ void add_release(uint32* counter, uint32 value) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;"
                 :
                 : "l"(counter), "r"(value)
                 : "memory");
}

__device__ __forceinline__ uint32 load_acquire(const uint32* counter) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
    return value;
}

// Adds to a counter with acquire-release semantics and returns its previous value. Writes that this
// thread made or observed are visible to later adders, and writes of earlier adders to this thread.
__device__ __forceinline__ uint32 add_acquire_release(uint32* counter, uint32 value) {
    uint32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(value)
                 : "memory");
    return before;
}
