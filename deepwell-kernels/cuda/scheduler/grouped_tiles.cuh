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

// Tiles of a result [rows, columns] for each group.
template <int kTileM, int kTileN>
class GroupedResultTiles {
    uint32 groups_;
    int32 rows_;
    uint32 tiles_down_;
    uint32 tiles_across_;
    uint32 tile_ = blockIdx.x;

  public:
    __device__ __forceinline__ GroupedResultTiles(int32 groups, int32 rows, int32 columns)
        : groups_(groups),
          rows_(rows),
          tiles_down_((rows + kTileM - 1) / kTileM),
          tiles_across_((columns + kTileN - 1) / kTileN) {}

    // False after the last.
    __device__ __forceinline__ bool next(GroupTile& tile) {
        const uint32 of_group = tiles_down_ * tiles_across_;
        const uint32 group = tile_ / of_group;
        if (group >= groups_) {
            return false;
        }
        const TilePlace at =
            grouped_tile<2048 / kTileM>(tile_ % of_group, tiles_down_, tiles_across_);
        const TilePlace place{at.row * kTileM, at.column * kTileN};
        tile = GroupTile{static_cast<int32>(group), place, rows_};
        tile_ += gridDim.x;
        return true;
    }
};
