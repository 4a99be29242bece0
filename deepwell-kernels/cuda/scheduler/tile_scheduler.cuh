// Static persistent tile scheduler of sm_100, for CTAs or CTA pairs, one cluster at a time.
#pragma once

#include "common/types.cuh"
#include "mma/sm100_tile.cuh"
#include "scheduler/tile_order.cuh"

// Grid of the cluster tiles of a result of `rows` x `columns`.
template <typename S>
struct TileGrid {
    static constexpr uint32 kRows = S::kDown * S::kTileM;  // of a cluster
    static constexpr uint32 kColumns = S::kAcross * S::kTileN;

    uint32 rows;     // of clusters
    uint32 columns;  // of clusters

    __device__ __forceinline__ TileGrid(uint32 result_rows, uint32 result_columns)
        : rows((result_rows + kRows - 1) / kRows),
          columns((result_columns + kColumns - 1) / kColumns) {}

    // Returns the first element of the calling CTA's tile in a cluster tile. It may lie beyond the
    // result if tiles of other CTAs of the cluster do not. Clusters go down groups of 2048 rows.
    __device__ __forceinline__ TilePlace place(uint32 cluster) const {
        const TilePlace at = grouped_tile<2048 / kRows>(cluster, rows, columns);
        const uint32 tile = sm100::tile_in_cluster<S>();
        return TilePlace{at.row * kRows + tile % S::kDown * S::kTileM,
                         at.column * kColumns + tile / S::kDown * S::kTileN};
    }
};

// Static persistent scheduler: cluster tiles are taken with a stride of the number of clusters.
template <typename S>
struct TileScheduler {
    using Tile = TilePlace;

    TileGrid<S> grid;
    uint32 cluster = blockIdx.x / S::kClusterCtas;

    __device__ __forceinline__ TileScheduler(uint32 rows, uint32 columns)
        : grid(rows, columns) {}

    // Sets `place` to the first element of the next tile; returns false after the last tile.
    __device__ __forceinline__ bool next(TilePlace& place) {
        if (cluster >= grid.rows * grid.columns) {
            return false;
        }
        place = grid.place(cluster);
        cluster += gridDim.x / S::kClusterCtas;
        return true;
    }
};
