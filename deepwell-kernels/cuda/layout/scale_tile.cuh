// Memory layout of scales, as read by cuBLAS and tcgen05: tiles of 512 bytes, each with the four
// scales of 128 elements for 128 rows. Rows and scales beyond the matrix are zeros, up to whole
// tiles. Tiles are in row-major order. Same layout as `scale_tiles` of `deepwell-precision`.
#pragma once

#include "common/types.cuh"

constexpr uint32 kScaleTileRows = 128;
constexpr uint32 kScaleTileElements = 128;  // per row
constexpr uint32 kScaleTileBytes = 512;

// Byte offset, within a tile, of the four scales of row `row`.
__device__ __forceinline__ uint32 scale_row_place(uint32 row) {
    return row % 32 * 16 + row / 32 * 4;
}

// Number of tiles that cover `elements` elements of a row.
__device__ __forceinline__ uint32 scale_tiles_across(uint32 elements) {
    return (elements + kScaleTileElements - 1) / kScaleTileElements;
}

// Byte offset of the tile with the scale of (row, element), for rows of `elements` elements.
__device__ __forceinline__ uint64 scale_tile_place(uint32 row, uint32 element, uint32 elements) {
    const uint64 first = static_cast<uint64>(row / kScaleTileRows) * scale_tiles_across(elements);
    return (first + element / kScaleTileElements) * kScaleTileBytes;
}
