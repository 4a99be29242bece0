// The counters of a quantization, from threads to the six words of the op's last output.
#pragma once

#include "common/last_block.cuh"
#include "common/types.cuh"
#include "layout/mx_scale.cuh"

// Words that each block leaves in scratch: bits of amax, underflows, saturations, clamps,
// non-finite elements.
constexpr int kMxCounts = 5;
// Warps of a block at most.
constexpr uint32 kMxWarpsMax = 16;

// Combines the counts of all threads of a block: the maximum of the first, the sums of the others.
// Thread 0 has the result.
__device__ __forceinline__ void mx_combine_block(uint64 (&counts)[kMxCounts]) {
    __shared__ uint64 of_warps[kMxWarpsMax][kMxCounts];
    const uint32 warps = blockDim.x / 32;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            const uint64 other = __shfl_xor_sync(0xffffffffu, counts[i], lanes);
            counts[i] = i == 0 ? max(counts[i], other) : counts[i] + other;
        }
    }
    // Between two uses lies a barrier, that of `is_last_block`.
    if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            of_warps[threadIdx.x / 32][i] = counts[i];
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (uint32 warp = 1; warp < warps; ++warp) {
#pragma unroll
            for (int i = 0; i < kMxCounts; ++i) {
                const uint64 other = of_warps[warp][i];
                counts[i] = i == 0 ? max(counts[i], other) : counts[i] + other;
            }
        }
    }
}

// Ends a kernel that quantizes: block `block` of `blocks` leaves its counts in `partials`
// [blocks, kMxCounts], and the last one, which is told so, writes `statistics` [6]. Integers, so no
// order shows.
__device__ __forceinline__ bool mx_write_statistics(const MxCounters& mine, uint32 block,
                                                    uint32 blocks, uint64* partials,
                                                    uint32* ticket, uint64 elements,
                                                    uint64* statistics) {
    uint64 counts[kMxCounts] = {mine.amax, mine.underflows, mine.saturations, mine.clamps,
                                mine.nonfinite};
    mx_combine_block(counts);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            partials[static_cast<uint64>(block) * kMxCounts + i] = counts[i];
        }
    }
    // redundant bar.sync: the thread that takes the ticket has written the partials itself
    if (!is_last_block(ticket, blocks)) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < kMxCounts; ++i) {
        counts[i] = 0;
    }
    for (uint32 other = threadIdx.x; other < blocks; other += blockDim.x) {
#pragma unroll
        for (int i = 0; i < kMxCounts; ++i) {
            const uint64 count = __ldcg(partials + static_cast<uint64>(other) * kMxCounts + i);
            counts[i] = i == 0 ? max(counts[i], count) : counts[i] + count;
        }
    }
    mx_combine_block(counts);
    if (threadIdx.x == 0) {
        statistics[0] = counts[0];
        statistics[1] = elements;
#pragma unroll
        for (int i = 1; i < kMxCounts; ++i) {
            statistics[i + 1] = counts[i];
        }
    }
    return true;
}
