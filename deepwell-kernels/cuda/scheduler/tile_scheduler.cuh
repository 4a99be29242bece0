// Tile scheduler: the tiles that a CTA, or a CTA pair, computes one after the other, those of a
// cluster at a time.
#pragma once

#include "common/types.cuh"
#include "mma/sm100_tile.cuh"
#include "scheduler/tile_order.cuh"

// The tiles of a result of `rows` x `columns`, by the numbers of clusters of them.
template <typename S>
struct TileGrid {
    static constexpr uint32 kRows = S::kDown * S::kTileM;  // of a cluster
    static constexpr uint32 kColumns = S::kAcross * S::kTileN;

    uint32 rows;     // of clusters
    uint32 columns;  // of clusters

    __device__ __forceinline__ TileGrid(uint32 result_rows, uint32 result_columns)
        : rows((result_rows + kRows - 1) / kRows),
          columns((result_columns + kColumns - 1) / kColumns) {}

    // The first element of the calling CTA's tile, which may lie beyond the result if those of
    // others of the cluster do not. Clusters go down groups of 2048 rows.
    __device__ __forceinline__ TilePlace place(uint32 cluster) const {
        const TilePlace at = grouped_tile<2048 / kRows>(cluster, rows, columns);
        const uint32 tile = sm100::tile_in_cluster<S>();
        return TilePlace{at.row * kRows + tile % S::kDown * S::kTileM,
                         at.column * kColumns + tile / S::kDown * S::kTileN};
    }
};

// The static persistent tile scheduler: every so many-th tile, by the grid alone.
template <typename S>
struct TileScheduler {
    using Tile = TilePlace;

    TileGrid<S> grid;
    uint32 cluster = blockIdx.x / S::kClusterCtas;

    __device__ __forceinline__ TileScheduler(uint32 rows, uint32 columns)
        : grid(rows, columns) {}

    // The first element of the next tile; false after the last.
    __device__ __forceinline__ bool next(TilePlace& place) {
        if (cluster >= grid.rows * grid.columns) {
            return false;
        }
        place = grid.place(cluster);
        cluster += gridDim.x / S::kClusterCtas;
        return true;
    }
};
