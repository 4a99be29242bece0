// Named barriers, for a subset of the warps of a CTA.
#pragma once

#include "common/types.cuh"

// Waits until `threads` threads (whole warps) have arrived at barrier `index`, 1 to 15. Memory
// writes before the barrier are then visible to all of these threads.
__device__ __forceinline__ void barrier_sync(uint32 index, uint32 threads) {
    asm volatile("barrier.sync.aligned %0, %1;" : : "r"(index), "r"(threads) : "memory");
}

// Arrives at the barrier without waiting.
__device__ __forceinline__ void barrier_arrive(uint32 index, uint32 threads) {
    asm volatile("barrier.arrive.aligned %0, %1;" : : "r"(index), "r"(threads) : "memory");
}
