// The static persistent tile scheduler: which tiles a CTA computes, one after the other.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "scheduler/tile_order.cuh"

// Tiles of kTileM x kTileN of a result, for the CTAs of a cluster kAcross of them side by side and
// kDown one below the other. Clusters take every so many-th one, in an order that goes down groups
// of 2048 rows: which tiles a CTA has follows from the grid alone. A result may have several parts,
// sums over a part of K each: all tiles of one come before those of the next.
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

    // The part that the last tile is of.
    __device__ __forceinline__ uint32 part() const {
        return part_;
    }

    // The first element of the next tile; false after the last. It may lie beyond the result where
    // those of other CTAs of the cluster do not.
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
