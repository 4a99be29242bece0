// Static persistent tile scheduler of sm_90.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "scheduler/tile_order.cuh"

// Tiles of kTileM x kTileN of a result. A cluster computes kAcross x kDown tiles, one per CTA.
// Clusters take tiles with a stride of the number of clusters, in an order that goes down groups of
// 2048 rows, so that the tiles of a CTA depend on the grid alone. A result may have several parts
// (split K), each a sum over a part of K: all tiles of one part come before the next part.
template <int kTileM, int kTileN, int kAcross, int kDown = 1>
class PersistentTiles {
    static constexpr uint32 kCtas = kAcross * kDown;
    static constexpr uint32 kRows = kDown * kTileM;  // of a cluster
    static constexpr uint32 kColumns = kAcross * kTileN;

    uint32 rows_;     // of clusters
    uint32 columns_;  // of clusters
    uint32 cluster_ = blockIdx.x / kCtas;
    uint32 part_ = 0;
    uint32 parts_;

  public:
    __device__ __forceinline__ PersistentTiles(uint32 rows, uint32 columns, uint32 parts = 1)
        : rows_((rows + kRows - 1) / kRows),
          columns_((columns + kColumns - 1) / kColumns),
          parts_(parts) {}

    // Part of the last returned tile.
    __device__ __forceinline__ uint32 part() const {
        return part_;
    }

    // Sets `place` to the first element of the next tile; returns false after the last tile. The
    // tile may lie beyond the result if tiles of other CTAs of the cluster do not.
    __device__ __forceinline__ bool next(TilePlace& place) {
        while (cluster_ >= rows_ * columns_) {
            if (++part_ >= parts_) {
                return false;
            }
            cluster_ -= rows_ * columns_;
        }
        const TilePlace at = grouped_tile<2048 / kRows>(cluster_, rows_, columns_);
        const uint32 rank = blockIdx.x % kCtas;
        place = TilePlace{at.row * kRows + rank % kDown * kTileM,
                          at.column * kColumns + rank / kDown * kTileN};
        cluster_ += gridDim.x / kCtas;
        return true;
    }
};
