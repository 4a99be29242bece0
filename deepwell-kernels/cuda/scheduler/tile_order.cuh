// Order of the tiles of a result.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"

// Returns the place, in tiles, of tile number `index`. The order goes down `kGroup` tile rows
// before the next column: concurrent CTAs then read few different rows and columns of the operands,
// which stay in the L2 cache.
template <uint32 kGroup = 8>
__device__ __forceinline__ TilePlace grouped_tile(uint32 index, uint32 rows, uint32 columns) {
    const uint32 group = index / (kGroup * columns);
    const uint32 first = group * kGroup;
    const uint32 height = min(rows - first, kGroup);
    const uint32 within = index - first * columns;
    return TilePlace{first + within % height, within / height};
}
