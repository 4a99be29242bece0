// Which tile of grouped rows a CTA computes. How many rows a group has is known on the device
// alone, so a grid is as large as groups can make it, and CTAs beyond the last tile do nothing.
#pragma once

#include "common/types.cuh"
#include "common/warp_scan.cuh"

// The rows from `row` to the end of their group, of which a tile has the first ones.
struct GroupTile {
    uint32 group;  // as many as there are groups: the rows behind all of them
    int32 row;
    int32 end;  // no more than `row` where there is no such tile
};

// Tile `index` of `kRows` rows each, group after group; behind the groups come the rows that none
// has. Offsets [groups + 1] ascend from 0 to `rows` at most. All threads of a warp call it.
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
