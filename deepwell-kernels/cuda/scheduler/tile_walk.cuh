// The tiles that a block of a persistent grid, or a pair of blocks, computes one after the other.
#pragma once

#include "common/types.cuh"
#include "scheduler/tile_order.cuh"

// Every so many-th tile of kRows x kColumns elements: which ones follows from the grid alone.
template <uint32 kRows, uint32 kColumns, uint32 kBlocks>
struct TileWalk {
    uint32 tile_rows;
    uint32 tile_columns;
    uint32 tile;
    uint32 stride;

    // Over a result of `rows` x `columns`.
    __device__ __forceinline__ TileWalk(uint32 rows, uint32 columns)
        : tile_rows((rows + kRows - 1) / kRows),
          tile_columns((columns + kColumns - 1) / kColumns),
          tile(blockIdx.x / kBlocks),
          stride(gridDim.x / kBlocks) {}

    // The first element of the next tile; false after the last.
    __device__ __forceinline__ bool next(TilePlace& place) {
        if (tile >= tile_rows * tile_columns) {
            return false;
        }
        // Groups of 2048 rows.
        const TilePlace at = grouped_tile<2048 / kRows>(tile, tile_rows, tile_columns);
        place = TilePlace{at.row * kRows, at.column * kColumns};
        tile += stride;
        return true;
    }
};
