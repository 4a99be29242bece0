// Static persistent tile schedulers of grouped GEMMs on tcgen05, for CTAs or CTA pairs. Group e of
// `groups` has rows offsets[e] to offsets[e + 1], multiples of 32; offsets are read on the device,
// as the host does not know them.
//
// Scale tiles cover 128 rows, or 128 elements along K, and ignore group boundaries. Tiles of rows
// and K-blocks therefore begin at multiples of 128, if necessary before their group: rows of other
// groups are not stored, and elements of other groups along K are not multiplied. Tiles are ordered
// by group. Within a group the order goes down 2048 rows before the next column: concurrent CTAs
// share the matrix of a group in the L2 cache.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "mma/sm100_tile.cuh"
#include "scheduler/tile_order.cuh"

// A tile of one group's result.
struct GroupedTile {
    TilePlace place;       // first element of the result
    int32 group;           // equal to the number of groups for the rows after all groups
    int32 first_row;       // first row of the result that belongs to the group
    int32 end_row;
    uint32 b_row;          // of the operand b, and of its scales
    uint32 b_scale_row;
    int32 first_k;         // elements along K that are multiplied, from a multiple of 32 on
    int32 end_k;

    __device__ __forceinline__ bool is_multiplied() const { return first_k < end_k; }

    __device__ __forceinline__ sm100::KBlocks k_blocks() const {
        constexpr int kBlockK = 128;
        return sm100::KBlocks{first_k / kBlockK, (end_k + kBlockK - 1) / kBlockK};
    }
};

// Tiles of a result [rows, columns] whose rows belong to groups, and then of the rows after all
// groups. Each group has a matrix of b with `columns` rows, and scale tiles of its own.
template <typename S>
class GroupedRowTiles {
    const int32* offsets_;
    int32 groups_;
    int32 rows_;
    uint32 result_columns_;
    int32 k_;
    uint32 columns_;         // of tiles
    int32 group_ = -1;       // group of the previous tile
    int32 first_ = 0;        // first row of the group
    int32 end_ = 0;
    uint32 tiles_down_ = 0;  // tiles of the group, in rows of tiles
    uint32 tile_ = blockIdx.x / S::kClusterCtas;  // next tile, counted from the first of the group

  public:
    using Tile = GroupedTile;

    __device__ __forceinline__ GroupedRowTiles(const int32* offsets, int32 groups, int32 rows,
                                               int32 columns, int32 k)
        : offsets_(offsets),
          groups_(groups),
          rows_(rows),
          result_columns_(columns),
          k_(k),
          columns_((columns + S::kTileN - 1) / S::kTileN) {}

    // Returns false after the last tile.
    __device__ __forceinline__ bool next(GroupedTile& tile) {
        while (tile_ >= tiles_down_ * columns_) {
            if (group_ == groups_) {
                return false;
            }
            tile_ -= tiles_down_ * columns_;
            ++group_;
            first_ = end_;
            // Clamped, so that invalid offsets cause no writes beyond the rows.
            end_ = group_ < groups_ ? min(max(offsets_[group_ + 1], first_), rows_) : rows_;
            const int32 spanned = end_ - first_ / sm100::kBlockM * sm100::kBlockM;
            tiles_down_ = end_ > first_ ? (spanned + S::kTileM - 1) / S::kTileM : 0;
        }
        const TilePlace at = grouped_tile<2048 / S::kTileM>(tile_, tiles_down_, columns_);
        const uint32 column = at.column * S::kTileN;
        tile.place = TilePlace{first_ / sm100::kBlockM * sm100::kBlockM + at.row * S::kTileM,
                               column};
        tile.group = group_;
        tile.first_row = first_;
        tile.end_row = end_;
        tile.b_row = group_ * result_columns_ + column;
        tile.b_scale_row = group_ * ((result_columns_ + 127) / 128 * 128) + column;
        tile.first_k = 0;
        tile.end_k = group_ < groups_ ? k_ : 0;
        tile_ += gridDim.x / S::kClusterCtas;
        return true;
    }
};

// Tiles of a result [rows, columns] for each group, contracted over the group's part of K.
template <typename S>
class GroupedResultTiles {
    const int32* offsets_;
    uint32 groups_;
    int32 rows_;
    uint32 tiles_down_;
    uint32 tiles_across_;
    uint32 tile_ = blockIdx.x / S::kClusterCtas;

  public:
    using Tile = GroupedTile;

    __device__ __forceinline__ GroupedResultTiles(const int32* offsets, int32 groups, int32 rows,
                                                  int32 columns)
        : offsets_(offsets),
          groups_(groups),
          rows_(rows),
          tiles_down_((rows + S::kTileM - 1) / S::kTileM),
          tiles_across_((columns + S::kTileN - 1) / S::kTileN) {}

    // Returns false after the last tile.
    __device__ __forceinline__ bool next(GroupedTile& tile) {
        const uint32 of_group = tiles_down_ * tiles_across_;
        const uint32 group = tile_ / of_group;
        if (group >= groups_) {
            return false;
        }
        const TilePlace at =
            grouped_tile<2048 / S::kTileM>(tile_ % of_group, tiles_down_, tiles_across_);
        tile.place = TilePlace{at.row * S::kTileM, at.column * S::kTileN};
        tile.group = group;
        tile.first_row = 0;
        tile.end_row = rows_;
        tile.b_row = tile.place.column;
        tile.b_scale_row = tile.place.column;
        tile.first_k = offsets_[group];
        tile.end_k = offsets_[group + 1];
        tile_ += gridDim.x / S::kClusterCtas;
        return true;
    }
};

// The tiles of `Tiles` with a nonempty range of K.
template <typename Tiles>
struct MultipliedTiles {
    using Tile = GroupedTile;

    Tiles tiles;

    __device__ __forceinline__ bool next(GroupedTile& tile) {
        while (tiles.next(tile)) {
            if (tile.is_multiplied()) {
                return true;
            }
        }
        return false;
    }
};
