// The counters of a quantization, from threads to the six words of the op's last output.
//
// Every CTA adds what it counted to totals of the call and draws a number; the one that draws the
// last writes the output and leaves the totals zero again. Integers, so no order shows.
//
// Before it draws, a CTA waits until what it added has arrived, and so has all else that its
// first warp wrote. A CTA therefore tallies as soon as it knows its counts, while most of its
// data is yet to be written, and looks at its number when it has written them: at the end of a
// CTA of one tile the same costs a tenth of the whole kernel.
//
// Where a CTA may do the work of others, which then never begin, it draws as many numbers as it
// did the work of.
#pragma once

#include "common/types.cuh"
#include "layout/mx_scale.cuh"
#include "ptx/release.cuh"

// Bits of amax, underflows, saturations, clamps, non-finite elements.
constexpr int kMxCounts = 5;
// Warps of a CTA at most.
constexpr uint32 kMxWarpsMax = 16;

// What the CTAs of a call add up; zero before and after it.
struct MxTotals {
    uint64 counts[kMxCounts];
    uint32 ctas;  // whose work is done
    uint32 unused;
};

// In shared memory.
struct MxTallyShared {
    uint32 of_warps[kMxWarpsMax][kMxCounts];
};

struct MxTally {
    MxTallyShared& shared;
    MxTotals* totals;
    uint32 ctas_done = 0;  // in the first thread

    __device__ __forceinline__ MxTally(MxTallyShared& shared, MxTotals* totals)
        : shared(shared), totals(totals) {}

    // By all threads, each with what it counted; a barrier of the CTA must follow. What was left
    // before is replaced, or added to where `adds`.
    __device__ __forceinline__ void leave(const MxCounters& counters, bool adds = false) const {
        const uint32 counts[kMxCounts] = {counters.amax, counters.underflows, counters.saturations,
                                          counters.clamps, counters.nonfinite};
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            const uint32 of_warp = i == 0 ? __reduce_max_sync(0xffffffffu, counts[i])
                                          : __reduce_add_sync(0xffffffffu, counts[i]);
            if (threadIdx.x % 32 == 0) {
                uint32& left = shared.of_warps[threadIdx.x / 32][i];
                const uint32 before = adds ? left : 0;
                left = i == 0 ? max(before, of_warp) : before + of_warp;
            }
        }
    }

    // By all threads behind that barrier, after the work of the CTA.
    __device__ __forceinline__ void give() {
        if (threadIdx.x >= 32) {
            return;
        }
        // A thread for each count, from which the first takes them: what one thread adds needs no
        // barrier before that thread tells of it.
        uint64 count = 0;
        if (threadIdx.x < kMxCounts) {
            for (uint32 warp = 0; warp < blockDim.x / 32; ++warp) {
                const uint64 other = shared.of_warps[warp][threadIdx.x];
                count = threadIdx.x == 0 ? max(count, other) : count + other;
            }
        }
        uint64 counts[kMxCounts];
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            counts[i] = __shfl_sync(0xffffffffu, count, i);
        }
        if (threadIdx.x == 0) {
            atomicMax(&totals->counts[0], counts[0]);
#pragma unroll
            for (int i = 1; i < kMxCounts; ++i) {
                if (counts[i] > 0) {
                    atomicAdd(&totals->counts[i], counts[i]);
                }
            }
            ctas_done = add_acquire_release(&totals->ctas, 1u) + 1;
        }
    }

    // By all threads: the last of `ctas` writes `statistics` [6] of so many elements.
    __device__ __forceinline__ void finish(uint32 ctas, uint64 elements,
                                           uint64* statistics) const {
        if (threadIdx.x > 0 || ctas_done != ctas) {
            return;
        }
        statistics[1] = elements;
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            statistics[i == 0 ? 0 : i + 1] = __ldcg(&totals->counts[i]);
            totals->counts[i] = 0;
        }
        totals->ctas = 0;
    }
};

// Ends a kernel with a grid of `ctas` CTAs which tallies last of all.
__device__ __forceinline__ void mx_write_statistics(const MxCounters& counters, uint32 ctas,
                                                    MxTotals* totals, uint64 elements,
                                                    uint64* statistics) {
    __shared__ MxTallyShared shared;
    MxTally tally(shared, totals);
    tally.leave(counters);
    __syncthreads();
    tally.give();
    tally.finish(ctas, elements, statistics);
}
