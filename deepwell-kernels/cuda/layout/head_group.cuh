// Groups of lanes that share a head of at most 256 elements: 1 to 32 neighbouring lanes of a warp,
// a power of two, with 16 bytes (eight BF16) per lane. Lanes beyond the head's last element hold
// zeros.
//
// Heads are numbered in 32 bits, of which 31 are used.
//
// A thread has the same position in `kHeads` heads, so that many loads are in flight and the gain
// is read once for all of them.
#pragma once

#include "common/types.cuh"

template <int kThreads, int kHeads>
struct HeadGroup {
    uint32 lanes;   // of a group
    uint32 lane;    // of the thread in its group
    uint32 groups;  // of the CTA
    uint32 index;   // of the group in the CTA
    uint32 vectors;  // of 16 bytes in a head

    __device__ __forceinline__ HeadGroup(uint32 head_dim, uint32 lanes)
        : lanes(lanes),
          lane(threadIdx.x % lanes),
          groups(kThreads / lanes),
          index(threadIdx.x / lanes),
          vectors(head_dim / 8) {}

    // Heads that the CTA processes at a time.
    __device__ __forceinline__ uint32 heads_at_a_time() const {
        return groups * kHeads;
    }

    // The `k`-th head of this thread; `first` is the CTA's first head.
    __device__ __forceinline__ uint32 head(uint32 first, int k) const {
        return first + index + k * groups;
    }

    __device__ __forceinline__ bool holds_a_vector() const {
        return lane < vectors;
    }

    // This thread's vector of a head, in units of 16 bytes.
    __device__ __forceinline__ uint64 vector_of(uint32 head) const {
        return static_cast<uint64>(head) * vectors + lane;
    }

    // Sums over the lanes of a group, returned in each lane. All lanes of the warp call it.
    __device__ __forceinline__ void sum(float (&values)[kHeads]) const {
#pragma unroll
        for (uint32 distance = 1; distance < 32; distance *= 2) {
            if (distance < lanes) {
#pragma unroll
                for (int k = 0; k < kHeads; ++k) {
                    values[k] = __fadd_rn(values[k],
                                          __shfl_xor_sync(0xffffffffu, values[k], distance));
                }
            }
        }
    }
};
