// Reduces the counters of a quantization from threads to the six words of the op's last output.
//
// Every CTA adds its counts to totals of the call and increments an arrival counter; the last CTA
// to arrive writes the output and resets the totals to zero. Integer sums do not depend on the
// order.
//
// Before a CTA arrives, it waits for its additions, and so for all earlier writes of its first
// warp. A CTA therefore tallies as soon as its counts are known, before most of its data is
// written, and reads its arrival index after its writes. Done at the end of a CTA of one tile, the
// same work costs a tenth of the whole kernel.
#pragma once

#include "common/types.cuh"
#include "layout/mx_scale.cuh"
#include "ptx/release.cuh"

// Bits of amax, underflows, saturations, clamps, non-finite elements.
constexpr int kMxCounts = 5;
// Maximum number of warps of a CTA.
constexpr uint32 kMxWarpsMax = 16;

// Totals over the CTAs of a call; zero before and after the call.
struct MxTotals {
    uint64 counts[kMxCounts];
    uint32 ctas;  // CTAs that have arrived
    uint32 unused;
};

// In shared memory.
struct MxTallyShared {
    uint32 of_warps[kMxWarpsMax][kMxCounts];
};

struct MxTally {
    MxTallyShared& shared;
    MxTotals* totals;
    uint32 ctas_done = 0;  // arrival index plus one; in the first thread

    __device__ __forceinline__ MxTally(MxTallyShared& shared, MxTotals* totals)
        : shared(shared), totals(totals) {}

    // Called by all threads, each with its counts; a barrier of the CTA must follow. Replaces the
    // counts left before, or adds to them if `adds`.
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

    // Called by all threads after that barrier, once the CTA's counts are complete.
    __device__ __forceinline__ void give() {
        if (threadIdx.x >= 32) {
            return;
        }
        // Each count has a thread, and thread 0 collects all counts: additions of a single thread
        // need no barrier before its arrival.
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

    // By all threads: the last of `ctas` CTAs writes `statistics` [6]; `elements` is one of the
    // six.
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

// Tallies at the end of a kernel with a grid of `ctas` CTAs.
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
