// The static persistent tile schedulers of grouped GEMMs: which tiles a CTA computes, one after the
// other. Group e of `groups` has rows offsets[e] to offsets[e + 1]; offsets are read here, the host
// does not know them.
//
// Tiles of a group follow each other, and within a group those go down 2048 rows first: CTAs that
// run together share the matrix of a group and few rows and columns of it in the L2 cache.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "scheduler/tile_order.cuh"

// A tile of what belongs to a group.
struct GroupTile {
    int32 group;
    TilePlace place;  // first element of the result
    int32 end;        // the first row of the result that is no longer the group's
};

// Tiles of a result [rows, columns] whose rows belong to groups. What lies behind the last group
// comes as a group of its own, number `groups`. A tile has rows of one group alone.
template <int kTileM, int kTileN>
class GroupedRowTiles {
    const int32* offsets_;
    int32 groups_;
    int32 rows_;
    uint32 columns_;            // of tiles
    int32 group_ = -1;          // the one of the tile before
    int32 first_ = 0;           // its rows
    int32 end_ = 0;
    uint32 tiles_down_ = 0;     // its tiles
    uint32 tile_ = blockIdx.x;  // the next one, counted from its first

  public:
    __device__ __forceinline__ GroupedRowTiles(const int32* offsets, int32 groups, int32 rows,
                                               int32 columns)
        : offsets_(offsets),
          groups_(groups),
          rows_(rows),
          columns_((columns + kTileN - 1) / kTileN) {}

    // False after the last.
    __device__ __forceinline__ bool next(GroupTile& tile) {
        while (tile_ >= tiles_down_ * columns_) {
            if (group_ == groups_) {
                return false;
            }
            tile_ -= tiles_down_ * columns_;
            ++group_;
            first_ = end_;
            // Whatever the offsets are, nothing beyond the rows is written.
            end_ = group_ < groups_ ? min(max(offsets_[group_ + 1], first_), rows_) : rows_;
            tiles_down_ = (end_ - first_ + kTileM - 1) / kTileM;
        }
        const TilePlace at = grouped_tile<2048 / kTileM>(tile_, tiles_down_, columns_);
        tile = GroupTile{group_, TilePlace{first_ + at.row * kTileM, at.column * kTileN}, end_};
        tile_ += gridDim.x;
        return true;
    }
};

// Tiles of a result [rows, columns] for each group. The last of those below each other may have few
// rows. In each round CTAs move on among the tiles of their round, such that a CTA comes to all of
// those below each other in turn: in the same places, some would always have the last ones.
template <int kTileM, int kTileN>
class GroupedResultTiles {
    static constexpr uint32 kTilesBelow = 2048 / kTileM;  // before the next column
    uint32 groups_;
    int32 rows_;
    uint32 tiles_down_;
    uint32 tiles_across_;
    uint32 step_;                // in which a CTA moves on
    uint32 first_ = 0;           // of the round
    uint32 place_ = blockIdx.x;  // among the tiles of a round

  public:
    __device__ __forceinline__ GroupedResultTiles(int32 groups, int32 rows, int32 columns)
        : groups_(groups),
          rows_(rows),
          tiles_down_((rows + kTileM - 1) / kTileM),
          tiles_across_((columns + kTileN - 1) / kTileN) {
        // A round and a step are one more than a multiple of them.
        const uint32 below = min(tiles_down_, kTilesBelow);
        step_ = (below + 1 - gridDim.x % below) % below % gridDim.x;
    }

    // False after the last.
    __device__ __forceinline__ bool next(GroupTile& tile) {
        const uint32 of_group = tiles_down_ * tiles_across_;
        const uint32 index = first_ + place_;
        const uint32 group = index / of_group;
        if (group >= groups_) {
            return false;
        }
        const TilePlace at =
            grouped_tile<kTilesBelow>(index % of_group, tiles_down_, tiles_across_);
        const TilePlace place{at.row * kTileM, at.column * kTileN};
        tile = GroupTile{static_cast<int32>(group), place, rows_};
        first_ += gridDim.x;
        place_ += step_;
        place_ -= place_ >= gridDim.x ? gridDim.x : 0;
        return true;
    }
};
