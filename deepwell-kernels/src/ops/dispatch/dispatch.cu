// Where each pair of token and expert goes in rows that are grouped by expert: a stable counting
// sort of `chosen` [pairs], each the number of an expert.
//
//   offsets [groups + 1]   group g has the rows offsets[g] to offsets[g + 1], a multiple of `align`
//   load    [2, experts]   pairs that chose each expert; those of them that have a row
//   rows    [pairs]        the row of each pair, -1 for one beyond the capacity of its expert
//   pairs   [row_count]    the pair of each row, -1 for a row without one
//
// The experts from `first_here` to `end_here` are groups; pairs of others have no row.
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
#include "layout/expert_parts.cuh"

constexpr uint32 kThreads = 256;

// counts [runs, experts] becomes the number of pairs before each run; arrivals [1]. A CTA for each
// run of `run` pairs, a multiple of four; one CTA at least. `across`: experts that threads take at
// a time, a power of two. Writes all outputs but what `dispatch_place` finds: `rows` and `pairs`
// become -1.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_count(const int32* __restrict__ chosen, int32* __restrict__ offsets,
                   int32* __restrict__ load, int32* __restrict__ rows, int32* __restrict__ pairs,
                   uint32* counts, uint32* arrivals, uint32 pair_count, uint32 row_count,
                   uint32 experts, uint32 first_here, uint32 end_here, uint32 align,
                   uint32 capacity, uint32 run, uint32 across) {
    const Parts<kThreads> parts(across);
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
            const bool is_here = expert >= first_here && expert < end_here;
            load[expert] = sums.all;
            load[experts + expert] = is_here ? min(sums.all, capacity) : 0;
        }
    }
    __syncthreads();
    if (threadIdx.x >= 32) {
        return;
    }
    // A warp adds up the groups' lengths, 32 groups at a time.
    uint32 end = 0;
    for (uint32 first = first_here; first < end_here; first += 32) {
        const uint32 expert = first + threadIdx.x;
        const uint32 kept = expert < end_here ? load[experts + expert] : 0;
        end += inclusive_sum_of_warp((kept + align - 1) / align * align);
        if (expert < end_here) {
            offsets[expert - first_here + 1] = end;
        }
        end = __shfl_sync(0xffffffffu, end, 31);
    }
    if (threadIdx.x == 0) {
        offsets[0] = 0;
    }
}

// counts as `dispatch_count` leaves them, with the same runs. `across`: as there, of the experts
// that are groups.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_place(const int32* __restrict__ chosen, const int32* __restrict__ offsets,
                   int32* __restrict__ rows, int32* __restrict__ pairs,
                   const uint32* __restrict__ counts, uint32 pair_count, uint32 experts,
                   uint32 first_here, uint32 end_here, uint32 capacity, uint32 run,
                   uint32 across) {
    const Parts<kThreads> parts(across);
    const Segment segment(parts, pair_count, run);
    for (uint32 first = first_here; first < end_here; first += across) {
        const uint32 expert = first + parts.expert;
        uint32 count = 0;
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32) { ++count; });
        const uint32 before = sum_of_parts(parts, count).before;
        if (expert >= end_here) {
            continue;
        }
        uint32 place = counts[uint64{blockIdx.x} * experts + expert] + before;
        const uint32 first_row = offsets[expert - first_here];
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32 pair) {
            if (place < capacity) {
                rows[pair] = first_row + place;
                pairs[first_row + place] = pair;
            }
            ++place;
        });
    }
}
