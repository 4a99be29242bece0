// How the threads of a grid lie over the rows of a matrix where no row needs more than a warp: a
// row belongs to `lanes` neighbouring threads, a power of two of them, at most 32.
#pragma once

#include "common/types.cuh"

template <uint32 kThreads>
struct RowLanes {
    uint32 lanes;  // of a row
    uint32 lane;   // of the calling thread in its row
    uint32 first;  // the first row of the calling thread's warp
    uint32 step;   // rows of the whole grid

    __device__ __forceinline__ explicit RowLanes(uint32 lanes)
        : lanes(lanes),
          lane(threadIdx.x % lanes),
          first((blockIdx.x * kThreads + threadIdx.x / 32 * 32) / lanes),
          step(gridDim.x * (kThreads / lanes)) {}

    // The row of the calling thread where its warp is at `first`: warps stay together, so that
    // their threads can exchange what they have.
    __device__ __forceinline__ uint32 row(uint32 first) const {
        return first + threadIdx.x % 32 / lanes;
    }

    // Sum over the lanes of a row, for each of them. All threads of the warp call it.
    __device__ __forceinline__ float sum(float value) const {
        for (uint32 distance = lanes / 2; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(0xffffffffu, value, distance);
        }
        return value;
    }
};
