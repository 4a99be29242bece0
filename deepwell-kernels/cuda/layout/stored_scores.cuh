// Score gradients (ds) of attention in global memory, BF16, as one kernel stores and another reads
// them.
//
// A head has tiles of 128 queries and 128 keys: all tiles, or those on and below the diagonal if
// attention is causal. The tiles of 128 queries are contiguous. A tile has two blocks of 64
// queries. A block has core matrices of wgmma, 8 keys of 8 queries each (queries contiguous, 128
// bytes), first along the queries: an M-major left operand without swizzle.
//
// Queries are permuted within a block, so that a thread with ds^T in the accumulator layout of
// wgmma has whole rows of core matrices, 16 bytes, in registers: of each 32 queries, lane l has
// queries 8 i + 2 (l % 4) and the next, for i = 0 to 3. `query` maps a position to a query.
#pragma once

#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"

struct StoredScores {
    static constexpr uint32 kTileRows = 128;   // queries, and keys
    static constexpr uint32 kBlockRows = 64;   // queries
    static constexpr uint32 kCoreBytes = 128;  // 8 x 8 BF16
    static constexpr uint32 kEightKeysBytes = kBlockRows / 8 * kCoreBytes;
    static constexpr uint32 kBlockBytes = kTileRows / 8 * kEightKeysBytes;
    static constexpr uint32 kTileBytes = kTileRows / kBlockRows * kBlockBytes;

    uint8* bytes;

    // Number of tiles of a head. Causal attention has as many tiles of queries as of keys.
    static __device__ __forceinline__ uint32 of_head(uint32 query_tiles, uint32 key_tiles,
                                                     bool is_causal) {
        return is_causal ? key_tiles * (key_tiles + 1) / 2 : query_tiles * key_tiles;
    }

    // Index of a tile in its head with `key_tiles` tiles of keys.
    static __device__ __forceinline__ uint32 index(uint32 query_tile, uint32 key_tile,
                                                   uint32 key_tiles, bool is_causal) {
        return (is_causal ? query_tile * (query_tile + 1) / 2 : query_tile * key_tiles) +
               key_tile;
    }

    // The query at position `position` of a block, and of row `position` of its product.
    static __device__ __forceinline__ uint32 query(uint32 position) {
        return position / 32 * 32 + position % 8 / 2 * 8 + position % 32 / 8 * 2 + position % 2;
    }

    // The left operand of some keys of a block: M along the queries, K along the keys. `at` of the
    // result with `key_step(i)` is the i-th group of 16 keys.
    static __device__ __forceinline__ WgmmaMatrix columns(uint32 address) {
        return WgmmaMatrix{(address >> 4 & 0x3fff) | (kEightKeysBytes >> 4) << 16,
                           kCoreBytes >> 4};
    }

    static constexpr __device__ uint32 key_step(int step) {
        return step * 2 * kEightKeysBytes;
    }
};
