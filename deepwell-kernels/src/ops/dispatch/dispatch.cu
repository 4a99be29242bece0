// Computes the row of each pair of token and expert, with rows grouped by expert: a stable counting
// sort of `chosen` [pairs], each the number of an expert.
//
//   offsets [groups + 1]   group g has the rows offsets[g] to offsets[g + 1], a multiple of `align`
//   load    [2, experts]   number of pairs that chose each expert; number of pairs with a row
//   rows    [pairs]        the row of each pair, -1 beyond the capacity of the expert
//   pairs   [row_count]    the pair of each row, -1 for an empty row
//
// The experts from `first_here` to `end_here` are groups; pairs of other experts have no row.
//
// The pairs are split into runs, one per CTA, and a run into one part per warp. A warp processes 32
// pairs at a time: lanes that chose the same expert find each other, and the first of these lanes
// counts all. No order depends on atomics. `dispatch_count` counts a run's pairs by expert, and its
// last CTA converts the counts to the position of each run's first pair of each expert;
// `dispatch_place` then assigns rows to the pairs of a run.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/types.cuh"
#include "common/warp_scan.cuh"
#include "layout/expert_parts.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kWarps = kThreads / 32;
constexpr uint32 kAll = 0xffffffffu;
// Choice of lanes after the last pair.
constexpr uint32 kNobody = 0xffffffffu;
// Counts that a thread loads before using the first count.
constexpr uint32 kAhead = 16;

// Pairs per warp's part of the run and expert [kWarps, experts].
extern __shared__ uint32 tallies[];

// Calls `each(pair, expert, peers)`, one lane per pair, for the pairs of the calling warp's part of
// the run that chose an existing expert; `peers` are the lanes with the same choice. After all
// lanes have run `each`, the first lane of each expert calls `after(expert, number of peers)`.
template <typename Each, typename After>
__device__ __forceinline__ void pairs_of_warp(const int32* __restrict__ chosen, uint32 pair_count,
                                              uint32 run, uint32 experts, const Each& each,
                                              const After& after) {
    const uint32 length = (run + kWarps * 32 - 1) / (kWarps * 32) * 32;
    const uint32 end_of_run = min((blockIdx.x + 1) * run, pair_count);
    const uint32 first = min(blockIdx.x * run + threadIdx.x / 32 * length, end_of_run);
    const uint32 end = min(first + length, end_of_run);
    for (uint32 at = first; at < end; at += 32) {
        const uint32 pair = at + threadIdx.x % 32;
        const uint32 own = pair < end ? static_cast<uint32>(chosen[pair]) : kNobody;
        const uint32 expert = own < experts ? own : kNobody;
        const uint32 peers = __match_any_sync(kAll, expert);
        if (expert != kNobody) {
            each(pair, expert, peers);
        }
        __syncwarp();
        if (expert != kNobody && threadIdx.x % 32 == __ffs(peers) - 1) {
            after(expert, __popc(peers));
        }
        __syncwarp();
    }
}

// Counts the pairs of each warp's part. Called by all threads of the CTA.
__device__ __forceinline__ void tally(const int32* __restrict__ chosen, uint32 pair_count,
                                      uint32 run, uint32 experts) {
    for (uint32 i = threadIdx.x; i < kWarps * experts; i += kThreads) {
        tallies[i] = 0;
    }
    __syncthreads();
    uint32* const own = tallies + threadIdx.x / 32 * experts;
    pairs_of_warp(
        chosen, pair_count, run, experts, [](uint32, uint32, uint32) {},
        [&](uint32 expert, uint32 count) { own[expert] += count; });
    __syncthreads();
}

// counts [runs, experts] becomes the number of pairs before each run; arrivals [1]. One CTA per run
// of `run` pairs, at least one CTA. `across`: number of experts that the threads of the last CTA
// process at a time, a power of two. Writes all outputs except the results of `dispatch_place`:
// `rows` and `pairs` are initialized to -1.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_count(const int32* __restrict__ chosen, int32* __restrict__ offsets,
                   int32* __restrict__ load, int32* __restrict__ rows, int32* __restrict__ pairs,
                   uint32* counts, uint32* arrivals, uint32 pair_count, uint32 row_count,
                   uint32 experts, uint32 first_here, uint32 end_here, uint32 align,
                   uint32 capacity, uint32 run, uint32 across) {
    const Parts<kThreads> parts(across);
    const uint32 thread = blockIdx.x * kThreads + threadIdx.x;
    const uint32 threads = gridDim.x * kThreads;
    for (uint32 pair = thread; pair < pair_count; pair += threads) {
        rows[pair] = -1;
    }
    for (uint32 row = thread; row < row_count; row += threads) {
        pairs[row] = -1;
    }
    tally(chosen, pair_count, run, experts);
    for (uint32 expert = threadIdx.x; expert < experts; expert += kThreads) {
        uint32 count = 0;
        for (uint32 warp = 0; warp < kWarps; ++warp) {
            count += tallies[warp * experts + expert];
        }
        counts[uint64{blockIdx.x} * experts + expert] = count;
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
        // Several loads at a time, because each count comes from the L2 cache.
        const auto each_count = [&](const auto& take) {
            for (uint32 of_run = first_run; exists && of_run < end_run; of_run += kAhead) {
                uint32 ahead[kAhead];
#pragma unroll
                for (uint32 i = 0; i < kAhead; ++i) {
                    const uint32* const place = counts + uint64{of_run + i} * experts + expert;
                    ahead[i] = of_run + i < end_run ? __ldcg(place) : 0;
                }
#pragma unroll
                for (uint32 i = 0; i < kAhead; ++i) {
                    take(of_run + i, ahead[i]);
                }
            }
        };
        uint32 count = 0;
        each_count([&](uint32, uint32 own) { count += own; });
        const OfParts sums = sum_of_parts(parts, count);
        uint32 before = sums.before;
        each_count([&](uint32 of_run, uint32 own) {
            if (of_run < end_run) {
                counts[uint64{of_run} * experts + expert] = before;
            }
            before += own;
        });
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
    // A warp sums the groups' lengths, 32 groups at a time.
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

// counts as written by `dispatch_count`, with the same runs.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_place(const int32* __restrict__ chosen, const int32* __restrict__ offsets,
                   int32* __restrict__ rows, int32* __restrict__ pairs,
                   const uint32* __restrict__ counts, uint32 pair_count, uint32 experts,
                   uint32 first_here, uint32 end_here, uint32 capacity, uint32 run) {
    tally(chosen, pair_count, run, experts);
    // Converts each warp's pair count to the position of the warp's first pair among the expert's
    // pairs.
    for (uint32 expert = threadIdx.x; expert < experts; expert += kThreads) {
        uint32 before = counts[uint64{blockIdx.x} * experts + expert];
        for (uint32 warp = 0; warp < kWarps; ++warp) {
            uint32& place = tallies[warp * experts + expert];
            const uint32 own = place;
            place = before;
            before += own;
        }
    }
    __syncthreads();
    uint32* const places = tallies + threadIdx.x / 32 * experts;
    pairs_of_warp(
        chosen, pair_count, run, experts,
        [&](uint32 pair, uint32 expert, uint32 peers) {
            const uint32 before = __popc(peers & ((1u << threadIdx.x % 32) - 1));
            const uint32 place = places[expert] + before;
            if (expert >= first_here && expert < end_here && place < capacity) {
                const uint32 row = offsets[expert - first_here] + place;
                rows[pair] = row;
                pairs[row] = pair;
            }
        },
        [&](uint32 expert, uint32 count) { places[expert] += count; });
}
