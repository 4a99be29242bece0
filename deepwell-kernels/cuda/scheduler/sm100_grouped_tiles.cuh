// The static persistent tile schedulers of grouped GEMMs on tcgen05: which tiles a CTA, or a CTA
// pair, computes, one after the other. Group e of `groups` has offsets[e] to offsets[e + 1] of the
// rows of all, multiples of 32; offsets are read here, the host does not know them.
//
// Scale tiles have 128 rows, or 128 elements along K, whatever groups they belong to. So tiles of
// rows begin at multiples of 128, before their group if need be, and K-blocks do, too: what a tile
// reads of other groups is not stored, or not multiplied. Tiles of a group follow each other, and
// within a group those go down 2048 rows first: CTAs that run together share the matrix of a group
// in the L2 cache.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "mma/sm100_tile.cuh"
#include "scheduler/tile_order.cuh"

// A tile of what belongs to a group.
struct GroupedTile {
    TilePlace place;       // first element of the result
    int32 group;           // as many as there are groups: the rows behind all of them
    int32 first_row;       // rows of the result that are the group's
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

// Tiles of a result [rows, columns] whose rows belong to groups, and then of the rows that none
// has. Each group has a matrix of b with `columns` rows, and scales in tiles of its own.
template <typename S>
class GroupedRowTiles {
    const int32* offsets_;
    int32 groups_;
    int32 rows_;
    uint32 result_columns_;
    int32 k_;
    uint32 columns_;         // of tiles
    int32 group_ = -1;       // the one of the tile before
    int32 first_ = 0;        // its rows
    int32 end_ = 0;
    uint32 tiles_down_ = 0;  // its tiles
    uint32 tile_ = blockIdx.x / S::kClusterCtas;  // the next one, counted from its first

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

    // False after the last.
    __device__ __forceinline__ bool next(GroupedTile& tile) {
        while (tile_ >= tiles_down_ * columns_) {
            if (group_ == groups_) {
                return false;
            }
            tile_ -= tiles_down_ * columns_;
            ++group_;
            first_ = end_;
            // Whatever the offsets are, nothing beyond the rows is written.
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

// Tiles of a result [rows, columns] for each group, over its part of the contraction.
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

    // False after the last.
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

// Those of `Tiles` that something is multiplied for.
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
