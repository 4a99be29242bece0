// The tiles that a block, or a pair of blocks, computes one after the other: those of a cluster at
// a time.
#pragma once

#include "common/types.cuh"
#include "mma/sm100_tile.cuh"
#include "ptx/launch_control.cuh"
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

    // The first element of the calling block's tile, which may lie beyond the result if those of
    // others of the cluster do not. Clusters go down groups of 2048 rows.
    __device__ __forceinline__ TilePlace place(uint32 cluster) const {
        const TilePlace at = grouped_tile<2048 / kRows>(cluster, rows, columns);
        const uint32 tile = sm100::tile_in_cluster<S>();
        return TilePlace{at.row * kRows + tile % S::kDown * S::kTileM,
                         at.column * kColumns + tile / S::kDown * S::kTileN};
    }
};

// Of a persistent grid, every so many-th tile: which ones follows from the grid alone.
template <typename S>
struct TileWalk {
    static constexpr bool kClaimsTiles = false;

    TileGrid<S> grid;
    uint32 cluster = blockIdx.x / S::kClusterBlocks;

    __device__ __forceinline__ TileWalk(const sm100::Shared<S>&, uint32 rows, uint32 columns)
        : grid(rows, columns) {}

    __device__ __forceinline__ const TileWalk& asking() const {
        return *this;
    }

    // The first element of the next tile; false after the last.
    __device__ __forceinline__ bool next(TilePlace& place) {
        if (cluster >= grid.rows * grid.columns) {
            return false;
        }
        place = grid.place(cluster);
        cluster += gridDim.x / S::kClusterBlocks;
        return true;
    }
};

// Of a grid with all clusters of tiles, the one that the grid gave, then those of clusters that
// have not begun: who is done sooner takes more. Other grids run in between, as soon as a tile is
// done. The thread that copies operands asks for a tile ahead; all that take part get the answer.
template <typename S, bool kAsks = false>
struct ClaimedTiles {
    static constexpr bool kClaimsTiles = true;

    const sm100::Shared<S>& shared;
    TileGrid<S> grid;
    sm100::Ring<sm100::kClaims> ring;
    bool has_begun = false;

    __device__ __forceinline__ ClaimedTiles(const sm100::Shared<S>& shared, TileGrid<S> grid)
        : shared(shared), grid(grid) {}

    __device__ __forceinline__ ClaimedTiles(const sm100::Shared<S>& shared, uint32 rows,
                                            uint32 columns)
        : ClaimedTiles(shared, TileGrid<S>(rows, columns)) {}

    // For the one thread of each block that asks.
    __device__ __forceinline__ ClaimedTiles<S, true> asking() const {
        return ClaimedTiles<S, true>(shared, grid);
    }

    __device__ __forceinline__ void ask() const {
        uint64* answered = shared.answered + ring.index;
        if (sm100::rank_in_cluster<S>() == 0) {
            sm100::wait<S>(shared.taken + ring.index, ring.phase ^ 1);
            // redundant release of mbarrier.arrive: it hands on nothing of this thread
            mbarrier_expect(answered, sizeof(uint4));
            claim_cluster<S::kClusterBlocks>(shared.answers + ring.index, answered);
        } else {
            // redundant release of mbarrier.arrive: it hands on nothing of this thread
            mbarrier_expect(answered, sizeof(uint4));
        }
    }

    // As of TileWalk; each thread for itself.
    __device__ __forceinline__ bool next(TilePlace& place) {
        uint32 block = blockIdx.x;
        if (has_begun) {
            sm100::wait<S>(shared.answered + ring.index, ring.phase);
            const bool is_there = claimed_cluster(shared.answers + ring.index, block);
            // It is read before another answer is written there.
            fence_before_copies();
            sm100::arrive_at<S>(shared.taken + ring.index, 0);
            ring.advance();
            if (!is_there) {
                return false;
            }
        }
        has_begun = true;
        if constexpr (kAsks) {
            ask();
        }
        place = grid.place(block / S::kClusterBlocks);
        return true;
    }
};
