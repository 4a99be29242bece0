// Assigns tiles of grouped rows to CTAs. The sizes of groups are known on the device alone, so the
// grid covers the largest possible number of tiles, and CTAs beyond the last tile exit.
#pragma once

#include "common/types.cuh"
#include "common/warp_scan.cuh"

// A tile: the first rows from `row` on, up to the end of the group.
struct GroupTile {
    uint32 group;  // equal to the number of groups for the rows after all groups
    int32 row;
    int32 end;  // at most `row` if the tile does not exist
};

// Returns tile `index`, of `kRows` rows, counted group after group; the rows after all groups come
// last. Offsets [groups + 1] ascend from 0 to at most `rows`. All threads of a warp call it.
template <uint32 kRows>
__device__ __forceinline__ GroupTile group_tile(const int32* __restrict__ offsets, uint32 groups,
                                                int32 rows, uint32 index) {
    const uint32 lane = threadIdx.x % 32;
    uint32 before = 0;  // tiles of the groups before `first`
    for (uint32 first = 0; first <= groups; first += 32) {
        const uint32 group = first + lane;
        const int32 begin = group <= groups ? offsets[group] : rows;
        const int32 end = group < groups ? offsets[group + 1] : rows;
        const uint32 tiles = (static_cast<uint32>(end - begin) + kRows - 1) / kRows;
        const uint32 through = before + inclusive_sum_of_warp(tiles);
        const uint32 beyond = __ballot_sync(0xffffffffu, index < through);
        if (beyond != 0) {
            const int32 source = __ffs(beyond) - 1;
            const uint32 skipped = index - __shfl_sync(0xffffffffu, through - tiles, source);
            const int32 row = __shfl_sync(0xffffffffu, begin, source) + skipped * kRows;
            return GroupTile{first + source, row, __shfl_sync(0xffffffffu, end, source)};
        }
        before = __shfl_sync(0xffffffffu, through, 31);
    }
    return GroupTile{groups, rows, rows};
}
