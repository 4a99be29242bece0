// Where each pair of token and expert goes in rows that are grouped by expert: a stable counting
// sort of `chosen` [pairs], each the number of an expert.
//
//   offsets [experts + 1]  group e has the rows offsets[e] to offsets[e + 1], a multiple of `align`
//   load    [2, experts]   pairs that chose each expert; those of them that have a row
//   rows    [pairs]        the row of each pair, -1 for one beyond the capacity of its expert
//   pairs   [row_count]    the pair of each row, -1 for a row without one
//
// The pairs are cut into runs, a CTA each, and a run into parts: a thread has an expert and a part,
// of which it looks at every pair, as the threads of other experts do at the same time. Nothing is
// ordered by atomics. `dispatch_count` counts a run's pairs by expert, and its last CTA turns the
// counts into the place of each run's first pair of each expert; `dispatch_place` then gives the
// pairs of a run their rows.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/types.cuh"
#include "common/warp_scan.cuh"

constexpr uint32 kThreads = 256;

// How the threads of a CTA lie over experts and parts: neighbours have neighbouring experts, a
// power of two of them.
struct Parts {
    uint32 across;  // experts at a time
    uint32 count;   // parts
    uint32 expert;  // the calling thread's first
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

// The sum of `value` over the parts before the calling thread's, and of all parts: threads of one
// expert in the order of their parts. All threads of the CTA call it.
struct OfParts {
    uint32 before;
    uint32 all;
};

__device__ __forceinline__ OfParts sum_of_parts(const Parts& parts, uint32 value) {
    __shared__ uint32 values[kThreads];
    // The threads are done with the sums before.
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

// The pairs of the calling CTA's run that the calling thread looks at.
struct Segment {
    uint32 first;
    uint32 end;

    __device__ __forceinline__ Segment(const Parts& parts, uint32 pair_count, uint32 run) {
        // Parts begin at multiples of four pairs.
        const uint32 length = (run + parts.count * 4 - 1) / (parts.count * 4) * 4;
        const uint32 end_of_run = min((blockIdx.x + 1) * run, pair_count);
        first = min(blockIdx.x * run + parts.part * length, end_of_run);
        end = min(first + length, end_of_run);
    }
};

// counts [runs, experts] becomes the number of pairs before each run; arrivals [1]. A CTA for each
// run of `run` pairs, a multiple of four; one CTA at least. `across`: experts that threads take at
// a time, a power of two. Writes all outputs but what `dispatch_place` finds: `rows` and `pairs`
// become -1.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_count(const int32* __restrict__ chosen, int32* __restrict__ offsets,
                   int32* __restrict__ load, int32* __restrict__ rows, int32* __restrict__ pairs,
                   uint32* counts, uint32* arrivals, uint32 pair_count, uint32 row_count,
                   uint32 experts, uint32 align, uint32 capacity, uint32 run, uint32 across) {
    const Parts parts(across);
    const Segment segment(parts, pair_count, run);
    const uint32 thread = blockIdx.x * kThreads + threadIdx.x;
    const uint32 threads = gridDim.x * kThreads;
    for (uint32 pair = thread; pair < pair_count; pair += threads) {
        rows[pair] = -1;
    }
    for (uint32 row = thread; row < row_count; row += threads) {
        pairs[row] = -1;
    }
    for (uint32 first = 0; first < experts; first += across) {
        const uint32 expert = first + parts.expert;
        uint32 count = 0;
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32) { ++count; });
        const uint32 all = sum_of_parts(parts, count).all;
        if (parts.part == 0 && expert < experts) {
            counts[uint64{blockIdx.x} * experts + expert] = all;
        }
    }
    if (!is_last_cta(arrivals, gridDim.x)) {
        return;
    }
    const uint32 runs_of_part = (gridDim.x + parts.count - 1) / parts.count;
    const uint32 first_run = parts.part * runs_of_part;
    const uint32 end_run = min(first_run + runs_of_part, gridDim.x);
    for (uint32 first = 0; first < experts; first += across) {
        const uint32 expert = first + parts.expert;
        const bool exists = expert < experts;
        uint32 count = 0;
#pragma unroll 8
        for (uint32 of_run = first_run; exists && of_run < end_run; ++of_run) {
            count += __ldcg(counts + uint64{of_run} * experts + expert);
        }
        const OfParts sums = sum_of_parts(parts, count);
        uint32 before = sums.before;
#pragma unroll 8
        for (uint32 of_run = first_run; exists && of_run < end_run; ++of_run) {
            uint32* const place = counts + uint64{of_run} * experts + expert;
            const uint32 own = __ldcg(place);
            *place = before;
            before += own;
        }
        if (parts.part == 0 && exists) {
            load[expert] = sums.all;
            load[experts + expert] = min(sums.all, capacity);
        }
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    // A warp adds up the groups' lengths, 32 groups at a time.
    uint32 end = 0;
    for (uint32 first = 0; first < experts; first += 32) {
        const uint32 expert = first + threadIdx.x;
        const uint32 kept = expert < experts ? load[experts + expert] : 0;
        end += inclusive_sum_of_warp((kept + align - 1) / align * align);
        if (expert < experts) {
            offsets[expert + 1] = end;
        }
        end = __shfl_sync(0xffffffffu, end, 31);
    }
    if (threadIdx.x == 0) {
        offsets[0] = 0;
    }
}

// counts as `dispatch_count` leaves them, with the same runs.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_place(const int32* __restrict__ chosen, const int32* __restrict__ offsets,
                   int32* __restrict__ rows, int32* __restrict__ pairs,
                   const uint32* __restrict__ counts, uint32 pair_count, uint32 experts,
                   uint32 capacity, uint32 run, uint32 across) {
    const Parts parts(across);
    const Segment segment(parts, pair_count, run);
    for (uint32 first = 0; first < experts; first += across) {
        const uint32 expert = first + parts.expert;
        uint32 count = 0;
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32) { ++count; });
        const uint32 before = sum_of_parts(parts, count).before;
        if (expert >= experts) {
            continue;
        }
        uint32 place = counts[uint64{blockIdx.x} * experts + expert] + before;
        const uint32 first_row = offsets[expert];
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32 pair) {
            if (place < capacity) {
                rows[pair] = first_row + place;
                pairs[first_row + place] = pair;
            }
            ++place;
        });
    }
}
