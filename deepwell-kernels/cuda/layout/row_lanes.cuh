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

    // `total` and the sums of `part` over sixteen neighbouring lanes each, added in the order of
    // the lanes: of 128 columns each, where a lane has eight. All threads of the warp call it.
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
