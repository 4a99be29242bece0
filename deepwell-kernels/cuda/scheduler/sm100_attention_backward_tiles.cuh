// Tiles of gradients of attention on tcgen05: the queries that see a tile of keys, and the keys
// that a tile of queries sees.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "layout/score_gradients.cuh"
#include "mma/sm100_attention_backward_tile.cuh"
#include "scheduler/attention_order.cuh"

namespace sm100_attention_backward {

// A launch is for the query heads of `head_count` key heads from `first_head` on, counted over all
// sequences.
struct Arguments {
    uint8* gradients;  // of scores, of the launch's heads; see layout/score_gradients.cuh
    int32 seq;
    uint32 heads;
    uint32 kv_heads;
    uint32 first_head;
    uint32 head_count;
    uint32 section_heads;  // see scheduler/attention_order.cuh
    uint32 band;           // tiles of keys that a tile of queries sees at most
    uint32 causal;
    float scale;
    float scale_log2;  // scale * log2(e), positive
    // For extended kernels.
    int32 window;            // at most the keys of a sequence, which also means no window
    const int32* documents;  // [batch * seq, 2], or null

    __device__ __forceinline__ SeenKeys seen_keys() const {
        return SeenKeys{documents, seq, window};
    }

    __device__ __forceinline__ uint32 tiles() const {
        return (seq + kTileRows - 1) / kTileRows;
    }

    // Query heads of a key head.
    __device__ __forceinline__ uint32 group() const {
        return heads / kv_heads;
    }

    __device__ __forceinline__ ScoreGradients score_gradients() const {
        return ScoreGradients{gradients, tiles(), band, causal};
    }
};

// Consecutive tiles.
struct TileRange {
    int32 begin;
    int32 end;

    __device__ __forceinline__ bool has(int32 tile) const {
        return tile >= begin && tile < end;
    }
};

// A tile of keys, and the tiles of queries that see some of them, at least one.
struct KeyTile {
    uint32 head;  // within the launch
    uint32 batch;
    uint32 kv_head;
    int32 tile;
    TileRange queries;

    // All blocks: of each query head of the group.
    __device__ __forceinline__ uint32 blocks(const Arguments& arguments) const {
        return arguments.group() * (queries.end - queries.begin);
    }
};

template <bool kExtended>
__device__ __forceinline__ KeyTile key_tile(const Arguments& arguments) {
    // The most queries see the first keys, so these come first.
    const HeadTileIndex index = head_tile_at(blockIdx.x, arguments.tiles(), arguments.head_count,
                                             arguments.section_heads);
    KeyTile tile;
    tile.head = index.head;
    const uint32 head = arguments.first_head + index.head;
    tile.batch = head / arguments.kv_heads;
    tile.kv_head = head - tile.batch * arguments.kv_heads;
    tile.tile = index.tile;
    int32 queries = arguments.seq;
    if constexpr (kExtended) {
        const int32 last = arguments.seen_keys().last_seeing(
            tile.batch * arguments.seq, (tile.tile + 1) * kTileRows - 1);
        queries = min(queries, last + 1);
    }
    tile.queries.begin = arguments.causal != 0 ? tile.tile : 0;
    tile.queries.end = (queries + kTileRows - 1) / kTileRows;
    return tile;
}

// A tile of queries of a head of the group of a key tile, in the order of processing.
struct Block {
    uint32 in_group;
    int32 query_tile;

    __device__ __forceinline__ explicit Block(const KeyTile& tile)
        : in_group(0), query_tile(tile.queries.begin) {}

    __device__ __forceinline__ void advance(const KeyTile& tile) {
        if (++query_tile == tile.queries.end) {
            query_tile = tile.queries.begin;
            ++in_group;
        }
    }
};

// The tiles of keys that a tile of queries sees; none beyond the sequence. These are the tiles
// whose `KeyTile` has the tile of queries.
template <bool kExtended>
__device__ __forceinline__ TileRange seen_tiles(const Arguments& arguments, uint32 batch,
                                                int32 query_tile) {
    const int32 tiles = arguments.tiles();
    if (query_tile >= tiles) {
        return TileRange{tiles, tiles};
    }
    TileRange range{0, arguments.causal != 0 ? query_tile + 1 : tiles};
    if constexpr (kExtended) {
        const int32 first = arguments.seen_keys().first_seen(batch * arguments.seq,
                                                             query_tile * kTileRows);
        range.begin = max(0, first) / kTileRows;
    }
    return range;
}

}  // namespace sm100_attention_backward
