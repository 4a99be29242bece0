// The 256 threads that quantize a tile: a block, or one of several parts of it.
#pragma once

#include "common/types.cuh"
#include "ptx/barrier.cuh"

struct MxTeam {
    static constexpr uint32 kThreads = 256;

    uint32 thread;  // in the team
    uint32 index;   // in the block

    static __device__ __forceinline__ MxTeam mine() {
        return {threadIdx.x % kThreads, threadIdx.x / kThreads};
    }
    // Waits for all threads of the team.
    __device__ __forceinline__ void sync() const {
        barrier_sync(1 + index, kThreads);
    }
};
