// How scales lie in memory: as cuBLAS and tcgen05 read them, in tiles of 512 bytes, each of which
// has the four scales of 128 elements for 128 rows. Rows and scales that a matrix does not have are
// zeros, up to whole tiles. Tiles follow each other along a row first. The meaning is that of
// `scale_tiles` of `deepwell-precision`.
#pragma once

#include "common/types.cuh"

constexpr uint32 kScaleTileRows = 128;
constexpr uint32 kScaleTileElements = 128;  // of a row
constexpr uint32 kScaleTileBytes = 512;

// Where the four scales of row `row` of a tile lie in it, bytes.
__device__ __forceinline__ uint32 scale_row_place(uint32 row) {
    return row % 32 * 16 + row / 32 * 4;
}

// Tiles that cover so many elements of a row.
__device__ __forceinline__ uint32 scale_tiles_across(uint32 elements) {
    return (elements + kScaleTileElements - 1) / kScaleTileElements;
}

// Where the tile begins that has the scale of (row, element), of rows of `elements`, bytes.
__device__ __forceinline__ uint64 scale_tile_place(uint32 row, uint32 element, uint32 elements) {
    const uint64 first = static_cast<uint64>(row / kScaleTileRows) * scale_tiles_across(elements);
    return (first + element / kScaleTileElements) * kScaleTileBytes;
}
