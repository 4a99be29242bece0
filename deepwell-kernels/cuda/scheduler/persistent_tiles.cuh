// The static persistent tile scheduler: which tiles a CTA computes, one after the other.
#pragma once

#include "common/opaque.cuh"
#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "scheduler/tile_order.cuh"

// Tiles of kTileM x kTileN of a result, kDown of them one below the other and kAcross side by side
// for the CTAs of a cluster, of which one is 1; or one for the kParts CTAs of a cluster. Clusters
// take every so many-th one, in an order that goes down groups of 2048 rows: which tiles a CTA has
// follows from the grid alone.
template <int kTileM, int kTileN, int kDown, int kAcross, int kParts = 1>
class PersistentTiles {
    static_assert(kDown == 1 || kAcross == 1, "clusters are a row or a column of tiles");
    static constexpr uint32 kCtas = kDown * kAcross * kParts;
    static constexpr uint32 kRows = kDown * kTileM;  // of a cluster
    static constexpr uint32 kColumns = kAcross * kTileN;

    uint32 rows_;
    uint32 columns_;
    uint32 cluster_ = blockIdx.x / kCtas;

    __device__ __forceinline__ uint32 clusters_down() const { return (rows_ + kRows - 1) / kRows; }

    __device__ __forceinline__ uint32 clusters_across() const {
        return (columns_ + kColumns - 1) / kColumns;
    }

    __device__ __forceinline__ TilePlace place_of(uint32 cluster) const {
        const TilePlace at =
            grouped_tile<2048 / kRows>(cluster, clusters_down(), clusters_across());
        const uint32 rank = blockIdx.x % kCtas;
        return TilePlace{at.row * kRows + (kDown == 1 ? 0 : rank * kTileM),
                         at.column * kColumns + (kAcross == 1 ? 0 : rank * kTileN)};
    }

  public:
    // Of a result of so many rows and columns.
    __device__ __forceinline__ PersistentTiles(uint32 rows, uint32 columns)
        : rows_(rows), columns_(columns) {}

    // The first element of the next tile; false after the last. It may lie beyond the result where
    // those of other CTAs of the cluster do not.
    __device__ __forceinline__ bool next(TilePlace& place) {
        if (cluster_ >= clusters_down() * clusters_across()) {
            return false;
        }
        place = place_of(cluster_);
        cluster_ += gridDim.x / kCtas;
        return true;
    }

    // The same place once more, computed anew: for those who have no register to keep it in.
    __device__ __forceinline__ TilePlace place() const {
        return place_of(opaque(cluster_ - gridDim.x / kCtas));
    }
};
