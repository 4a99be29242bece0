// Threads that share a row: whole warps, `threads` of them, several groups in a CTA. A thread
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

    // Slices of the rows of a CTA of `threads` threads.
    static constexpr __device__ __host__ uint32 slices(uint32 threads) {
        return threads * kVectors / kSliceVectors;
    }

    // `sums` has room for the slices of the CTA.
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

    // Number of vector `p` of this thread in its row.
    __device__ __forceinline__ uint32 vector(int p) const {
        return lane + p * threads;
    }

    // Sum over a row of `vectors` vectors, of which this thread knows the sums of its own; for all
    // threads of the group. `offset` moves the memory that is used: a thread may be at the next
    // sum while others still read this one, so two sums in a row lie at two places.
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
