// The group whose tile measures a grouped GEMM, as `sampled_group` of deepwell-ir chooses it.
#pragma once

#include "common/types.cuh"

constexpr uint32 kSampledRows = 128;

// What the sampled group has of an operand, as `Part` of the launcher.
enum class Sampled : uint32 {
    kWhole,   // all of it: there are no groups
    kRows,    // its rows, of which some are sampled
    kAlong,   // a range of the contraction
    kMatrix,  // a matrix of a stack
};

struct SampledGroup {
    uint32 group;
    uint32 first;  // row
    uint32 end;

    // The first sampled row: in the middle of the group, at a multiple of the sampled rows.
    __device__ __forceinline__ uint32 first_sampled() const {
        const uint32 rows = end - first;
        const uint32 spare = rows > kSampledRows ? rows - kSampledRows : 0;
        return first + spare / 2 / kSampledRows * kSampledRows;
    }
};

// The first of the groups with the most rows; offsets [groups + 1] ascend.
__device__ __forceinline__ SampledGroup sampled_group(const int32* __restrict__ offsets,
                                                      uint32 groups) {
    SampledGroup best = {0, 0, 0};
    uint32 first = groups > 0 ? offsets[0] : 0;
    for (uint32 group = 0; group < groups; ++group) {
        const uint32 end = offsets[group + 1];
        if (group == 0 || end - first > best.end - best.first) {
            best = SampledGroup{group, first, end};
        }
        first = end;
    }
    return best;
}
