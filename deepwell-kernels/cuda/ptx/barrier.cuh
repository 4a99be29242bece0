// Barriers of a part of a CTA.
#pragma once

#include "common/types.cuh"

// Waits until `threads` threads (whole warps) have come to barrier `index`, 1 to 15. What they
// wrote to memory before is then visible to each other.
__device__ __forceinline__ void barrier_sync(uint32 index, uint32 threads) {
    asm volatile("barrier.sync.aligned %0, %1;" : : "r"(index), "r"(threads) : "memory");
}

// The same for a thread that comes to the barrier and does not wait.
__device__ __forceinline__ void barrier_arrive(uint32 index, uint32 threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" : : "r"(index), "r"(threads) : "memory");
}
