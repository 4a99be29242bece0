// Score gradients (ds) of attention in global memory, BF16, as one kernel on tcgen05 stores and
// another reads them.
//
// A query head has tiles of 128 queries and 128 keys. The tiles of 128 queries are contiguous: all
// tiles of keys, those on and below the diagonal if attention is causal, or of a window as many as
// 128 queries see. A tile has core matrices of 8 keys, 16 bytes of queries each, first along the
// queries: an M-major left operand without swizzle.
//
// Queries are permuted within 32, so that a thread with ds^T in the layout of
// ptx/tcgen05_16_lanes.cuh has whole rows of core matrices: position 8 c + 2 i + k has query
// 8 i + 2 c + k.
#pragma once

#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"

struct ScoreGradients {
    static constexpr uint32 kTileRows = 128;   // queries, and keys
    static constexpr uint32 kCoreBytes = 128;  // 8 keys x 8 queries
    static constexpr uint32 kEightKeysBytes = kTileRows / 8 * kCoreBytes;
    static constexpr uint32 kTileBytes = kTileRows / 8 * kEightKeysBytes;

    uint8* bytes;
    uint32 tiles;   // of a sequence, along either side
    uint32 band;    // tiles of keys that 128 queries see, at most `tiles`
    uint32 causal;

    // Whether only tiles on and below the diagonal are stored.
    __device__ __forceinline__ bool is_triangle() const {
        return causal != 0 && band == tiles;
    }

    // Number of tiles of a query head.
    __device__ __forceinline__ uint32 of_head() const {
        return is_triangle() ? tiles * (tiles + 1) / 2 : tiles * band;
    }

    // The tile of a query head of the launch.
    __device__ __forceinline__ uint8* tile(uint32 head, uint32 query_tile, uint32 key_tile) const {
        // A window's tiles of keys are consecutive, so their numbers modulo `band` differ.
        const uint32 in_head = is_triangle() ? query_tile * (query_tile + 1) / 2 + key_tile
                                             : query_tile * band + key_tile % band;
        return bytes + (static_cast<uint64>(head) * of_head() + in_head) * kTileBytes;
    }

    // The query, within 32, at a position: of the same lane of a product.
    static __device__ __forceinline__ uint32 query(uint32 position) {
        return position % 8 / 2 * 8 + position / 8 * 2 + position % 2;
    }

    // The left operand of some keys of a tile: M along the queries, K along the keys. `key_step`
    // advances K by 16.
    static __device__ __forceinline__ uint64 columns(uint32 address) {
        return tcgen05_matrix(address, kEightKeysBytes, kCoreBytes, 0);
    }

    static constexpr __device__ uint32 key_step(int step) {
        return step * 2 * kEightKeysBytes;
    }
};
