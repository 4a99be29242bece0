// Groups of `threads` threads (whole warps) that share a row; a CTA has several groups. A thread
// holds up to `kVectors` vectors of 16 bytes (eight BF16), `threads` vectors apart.
#pragma once

#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "ptx/barrier.cuh"

template <int kVectors>
struct RowGroup {
    uint32 threads;  // of the group, a multiple of 32
    uint32 index;    // of the group in the CTA
    uint32 lane;     // of the thread in the group
    float* sums;     // shared memory for the slices of the group's row

    // Slices of the rows that a CTA of `threads` threads holds.
    static constexpr __device__ __host__ uint32 slices(uint32 threads) {
        return threads * kVectors / kSliceVectors;
    }

    // `sums` has room for all slices of the CTA.
    __device__ __forceinline__ RowGroup(uint32 threads, float* sums)
        : threads(threads),
          index(threadIdx.x / threads),
          lane(threadIdx.x % threads),
          sums(sums + threadIdx.x / threads * slices(threads)) {}

    __device__ __forceinline__ void sync() const {
        if (threads == 32) {
            __syncwarp();
        } else {
            barrier_sync(1 + index, threads);
        }
    }

    // Index of vector `p` of this thread in its row.
    __device__ __forceinline__ uint32 vector(int p) const {
        return lane + p * threads;
    }

    // Sum over a row of `vectors` vectors, returned in all threads of the group; each thread passes
    // the sums of its own vectors. `offset` selects the shared memory: a thread may start the next
    // sum while others still read this one, so consecutive sums need different offsets.
    __device__ __forceinline__ float sum(const float (&of_vectors)[kVectors], uint32 vectors,
                                         uint32 offset) const {
        float* const place = sums + offset;
        const uint32 slices = (vectors + kSliceVectors - 1) / kSliceVectors;
#pragma unroll
        for (int p = 0; p < kVectors; ++p) {
            const float of_slice = sum_of_16_lanes(of_vectors[p]);
            if (lane % kSliceVectors == 0) {
                place[vector(p) / kSliceVectors] = of_slice;
            }
        }
        sync();
        return sum_of_slices(slices, [&](uint32 slice) { return place[slice]; });
    }
};
