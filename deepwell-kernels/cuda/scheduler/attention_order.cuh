// Order in which the tiles of an attention are computed.
//
// A tile belongs to a head of a sequence. Heads are processed in sections, small enough for all
// data that their tiles read to stay in the L2 cache. Within a section tiles are ordered by their
// number first, so that a caller who numbers the longest tiles lowest starts them first.
// Neighbouring heads of one tile number, which share keys and values, run at the same time.
#pragma once

#include "common/types.cuh"

struct HeadTileIndex {
    uint32 tile;  // within its head
    uint32 head;  // batch * heads + head
};

__device__ __forceinline__ HeadTileIndex head_tile_at(uint32 index, uint32 tiles, uint32 heads,
                                                      uint32 section_heads) {
    const uint32 section = index / (tiles * section_heads);
    const uint32 first_head = section * section_heads;
    const uint32 in_section = index - section * (tiles * section_heads);
    const uint32 heads_here = min(section_heads, heads - first_head);
    const uint32 tile = in_section / heads_here;
    return HeadTileIndex{tile, first_head + in_section - tile * heads_here};
}
