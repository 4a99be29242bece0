// Counts (token, expert) pairs by expert without atomics. The pairs are split into runs, one per
// CTA, and each run into parts. A thread is assigned an expert and a part and scans every pair of
// the part, at the same time as the threads of other experts.
#pragma once

#include "common/types.cuh"

// Layout of a CTA's threads over experts and parts: neighbouring threads have neighbouring experts,
// a power of two of experts at a time.
template <uint32 kThreads>
struct Parts {
    uint32 across;  // experts at a time
    uint32 count;   // parts
    uint32 expert;  // first expert of the calling thread
    uint32 part;

    __device__ __forceinline__ explicit Parts(uint32 across)
        : across(across),
          count(kThreads / across),
          expert(threadIdx.x % across),
          part(threadIdx.x / across) {}
};

// Calls `each(pair)` for the pairs from `first` to `end` that chose `expert`, in order. `first` is
// a multiple of four.
template <typename Each>
__device__ __forceinline__ void pairs_of(uint32 expert, const int32* __restrict__ chosen,
                                         uint32 first, uint32 end, const Each& each) {
    const auto look = [&](uint32 pair, int32 own) {
        if (static_cast<uint32>(own) == expert) {
            each(pair);
        }
    };
    uint32 pair = first;
#pragma unroll 4
    for (; pair + 4 <= end; pair += 4) {
        const int4 four = *reinterpret_cast<const int4*>(chosen + pair);
        look(pair, four.x);
        look(pair + 1, four.y);
        look(pair + 2, four.z);
        look(pair + 3, four.w);
    }
    for (; pair < end; ++pair) {
        look(pair, chosen[pair]);
    }
}

// Sum of `value` over the parts before the calling thread's part, and over all parts, among the
// threads of one expert in the order of parts. All threads of the CTA call `sum_of_parts`.
struct OfParts {
    uint32 before;
    uint32 all;
};

template <uint32 kThreads>
__device__ __forceinline__ OfParts sum_of_parts(const Parts<kThreads>& parts, uint32 value) {
    __shared__ uint32 values[kThreads];
    // All threads have read the values of the previous call.
    __syncthreads();
    values[threadIdx.x] = value;
    __syncthreads();
    OfParts sums{0, 0};
    for (uint32 part = 0; part < parts.count; ++part) {
        sums.before += part < parts.part ? values[part * parts.across + parts.expert] : 0;
        sums.all += values[part * parts.across + parts.expert];
    }
    return sums;
}

// The pairs of the CTA's run that the calling thread scans.
struct Segment {
    uint32 first;
    uint32 end;

    template <uint32 kThreads>
    __device__ __forceinline__ Segment(const Parts<kThreads>& parts, uint32 pair_count,
                                       uint32 run) {
        // Parts begin at multiples of four pairs.
        const uint32 length = (run + parts.count * 4 - 1) / (parts.count * 4) * 4;
        const uint32 end_of_run = min((blockIdx.x + 1) * run, pair_count);
        first = min(blockIdx.x * run + parts.part * length, end_of_run);
        end = min(first + length, end_of_run);
    }
};
