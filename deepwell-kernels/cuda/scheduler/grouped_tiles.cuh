// Static persistent tile schedulers of grouped GEMMs. Group e of `groups` has rows offsets[e] to
// offsets[e + 1]; offsets are read on the device, as the host does not know them.
//
// Tiles are ordered by group. Within a group the order goes down 2048 rows before the next column:
// concurrent CTAs share the matrix of a group and few rows and columns of it in the L2 cache.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "scheduler/tile_order.cuh"

// A tile of one group's result.
struct GroupTile {
    int32 group;
    TilePlace place;  // first element of the result
    int32 end;        // one past the last row of the result that belongs to the group
};

// Tiles of a result [rows, columns] whose rows belong to groups. Rows after the last group form a
// group of their own, number `groups`. All rows of a tile belong to one group.
template <int kTileM, int kTileN>
class GroupedRowTiles {
    const int32* offsets_;
    int32 groups_;
    int32 rows_;
    uint32 columns_;            // of tiles
    int32 group_ = -1;          // group of the previous tile
    int32 first_ = 0;           // first row of the group
    int32 end_ = 0;
    uint32 tiles_down_ = 0;     // tiles of the group, in rows of tiles
    uint32 tile_ = blockIdx.x;  // next tile, counted from the first of the group

  public:
    __device__ __forceinline__ GroupedRowTiles(const int32* offsets, int32 groups, int32 rows,
                                               int32 columns)
        : offsets_(offsets),
          groups_(groups),
          rows_(rows),
          columns_((columns + kTileN - 1) / kTileN) {}

    // Returns false after the last tile.
    __device__ __forceinline__ bool next(GroupTile& tile) {
        while (tile_ >= tiles_down_ * columns_) {
            if (group_ == groups_) {
                return false;
            }
            tile_ -= tiles_down_ * columns_;
            ++group_;
            first_ = end_;
            // Clamped, so that invalid offsets cause no writes beyond the rows.
            end_ = group_ < groups_ ? min(max(offsets_[group_ + 1], first_), rows_) : rows_;
            tiles_down_ = (end_ - first_ + kTileM - 1) / kTileM;
        }
        const TilePlace at = grouped_tile<2048 / kTileM>(tile_, tiles_down_, columns_);
        tile = GroupTile{group_, TilePlace{first_ + at.row * kTileM, at.column * kTileN}, end_};
        tile_ += gridDim.x;
        return true;
    }
};

// Tiles of a result [rows, columns] for each group. The last tile row of a result may have few
// rows. From one round of gridDim.x tiles to the next, a CTA moves by `step_` within the round, so
// that it computes all tile rows of a column in turn. Without this step some CTAs would compute the
// short last row in every round.
template <int kTileM, int kTileN>
class GroupedResultTiles {
    static constexpr uint32 kTilesBelow = 2048 / kTileM;  // tile rows before the next column
    uint32 groups_;
    int32 rows_;
    uint32 tiles_down_;
    uint32 tiles_across_;
    uint32 step_;                // by which a CTA moves within the round
    uint32 first_ = 0;           // of the round
    uint32 place_ = blockIdx.x;  // among the tiles of a round

  public:
    __device__ __forceinline__ GroupedResultTiles(int32 groups, int32 rows, int32 columns)
        : groups_(groups),
          rows_(rows),
          tiles_down_((rows + kTileM - 1) / kTileM),
          tiles_across_((columns + kTileN - 1) / kTileN) {
        // gridDim.x + step_ is congruent to 1 modulo the tile rows of a column.
        const uint32 below = min(tiles_down_, kTilesBelow);
        step_ = (below + 1 - gridDim.x % below) % below % gridDim.x;
    }

    // Returns false after the last tile.
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
