// Layout of a grid's threads over matrix rows that need at most one warp each: a row belongs to
// `lanes` neighbouring threads, a power of two of at most 32.
#pragma once

#include "common/types.cuh"

template <uint32 kThreads>
struct RowLanes {
    uint32 lanes;  // per row
    uint32 lane;   // of the calling thread in its row
    uint32 first;  // first row of the calling thread's warp
    uint32 step;   // rows of the whole grid

    __device__ __forceinline__ explicit RowLanes(uint32 lanes)
        : lanes(lanes),
          lane(threadIdx.x % lanes),
          first((blockIdx.x * kThreads + threadIdx.x / 32 * 32) / lanes),
          step(gridDim.x * (kThreads / lanes)) {}

    // Row of the calling thread when its warp is at row `first`. Loops use the row of the warp, so
    // that warps stay converged for shuffles.
    __device__ __forceinline__ uint32 row(uint32 first) const {
        return first + threadIdx.x % 32 / lanes;
    }

    // Sum over the lanes of a row, returned in each lane. All threads of the warp call it.
    __device__ __forceinline__ float sum(float value) const {
        for (uint32 distance = lanes / 2; distance > 0; distance /= 2) {
            value += __shfl_xor_sync(0xffffffffu, value, distance);
        }
        return value;
    }

    // Adds to `total` the sums of `part` over each sixteen neighbouring lanes, in lane order. With
    // eight columns per lane, each sum covers 128 columns. All threads of the warp call it.
    __device__ __forceinline__ float add_by_sixteen(float total, float part) const {
        for (uint32 distance = min(lanes, 16u) / 2; distance > 0; distance /= 2) {
            part += __shfl_xor_sync(0xffffffffu, part, distance);
        }
        if (lanes < 32) {
            return total + part;
        }
        const float other = __shfl_xor_sync(0xffffffffu, part, 16);
        const bool is_first = lane < 16;
        return total + (is_first ? part : other) + (is_first ? other : part);
    }
};
