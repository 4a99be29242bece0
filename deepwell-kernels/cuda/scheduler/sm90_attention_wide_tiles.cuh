// Tiles of 64 keys of sm90_attention_backward_wide.cu: sizes, shared memory, places of tiles, and
// the producers of epilogue/sm90_attention_wide_key_gradients.cuh.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "layout/score_gradients.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/attention_order.cuh"

namespace sm90_attention {

// Keys of a tile, and queries of a stage.
constexpr int kWideRows = kWaveM;
// Registers per thread. The sum over all warpgroups is at most the CTA's initial allocation.
constexpr int kWideProducerRegisters = 40;
constexpr int kWideConsumerRegisters = 232;

// Key heads of a launch, of all heads of all sequences, and memory for their score gradients. Tiles
// are placed as in layout/score_gradients.cuh, elements in a tile as in layout/stored_scores.cuh.
struct WideHeads {
    uint32 first;
    uint32 count;
    ScoreGradients scores;
};

template <bool kTakesMore, int kKeyElements, int kValueElements, int kStageCount>
struct WideKeyShape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr int kKeyDim = kKeyElements;
    static constexpr int kValueDim = kValueElements;
    static constexpr int kStages = kStageCount;
    static constexpr int kWeights = 2;  // blocks of p in shared memory
    static constexpr uint32 kWeightsBytes = kWideRows * kWideRows * 4;
    using KeyRows = WgmmaRows<kWideRows, kKeyDim>;      // of keys and of queries
    using ValueRows = WgmmaRows<kWideRows, kValueDim>;  // of values and of dout
    static constexpr int kBarriers = 4 + 4 * kStages + 2 * kWeights;
    // dv is staged where the keys were, dk where the values were.
    static constexpr int kOwnBytes = 2 * KeyRows::kBytes;
    static_assert(ValueRows::kBytes <= KeyRows::kBytes, "room for dv");
    static constexpr int kSharedBytes =
        1024 + kOwnBytes + kStages * (KeyRows::kBytes + ValueRows::kBytes) +
        kWeights * kWeightsBytes + 2 * kStages * kWideRows * 4 + 256;
    static_assert(kSharedBytes <= 227 * 1024, "what a CTA may have");
    static_assert(kBarriers * 8 + 8 <= 256, "room for barriers and numbers of tiles");
};

// Shared memory from a 1024-byte boundary on.
template <typename S>
struct WideShared {
    uint8* keys;
    uint8* values;
    uint8* queries;   // [kStages]
    uint8* dout;      // [kStages]
    uint8* weights;   // [kWeights]
    float* lse_log2;  // [kStages][kWideRows]
    float* delta;     // [kStages][kWideRows]
    uint64* keys_full;
    uint64* keys_empty;
    uint64* values_full;
    uint64* values_empty;
    uint64* queries_full;
    uint64* queries_empty;
    uint64* dout_full;
    uint64* dout_empty;
    uint64* weights_full;
    uint64* weights_empty;
    volatile uint32* keys_tile;    // number of the tile of these keys
    volatile uint32* values_tile;  // and of these values

    __device__ __forceinline__ explicit WideShared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        keys = memory + (-address & 1023);
        values = keys + S::KeyRows::kBytes;
        queries = keys + S::kOwnBytes;
        dout = queries + S::kStages * S::KeyRows::kBytes;
        weights = dout + S::kStages * S::ValueRows::kBytes;
        lse_log2 = reinterpret_cast<float*>(weights + S::kWeights * S::kWeightsBytes);
        delta = lse_log2 + S::kStages * kWideRows;
        keys_full = reinterpret_cast<uint64*>(delta + S::kStages * kWideRows);
        keys_empty = keys_full + 1;
        values_full = keys_empty + 1;
        values_empty = values_full + 1;
        queries_full = values_empty + 1;
        queries_empty = queries_full + S::kStages;
        dout_full = queries_empty + S::kStages;
        dout_empty = dout_full + S::kStages;
        weights_full = dout_empty + S::kStages;
        weights_empty = weights_full + S::kWeights;
        keys_tile = reinterpret_cast<uint32*>(weights_empty + S::kWeights);
        values_tile = keys_tile + 1;
    }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        constexpr int kWarps = kWarpgroup / 32;
        mbarrier_set(keys_full);
        mbarrier_set(keys_empty);
        mbarrier_set(values_full);
        mbarrier_set(values_empty);
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(queries_full + i);
            mbarrier_set(queries_empty + i, kConsumers * kWarps);
            mbarrier_set(dout_full + i);
            mbarrier_set(dout_empty + i, kConsumers * kWarps);
        }
        for (int i = 0; i < S::kWeights; ++i) {
            mbarrier_set(weights_full + i, kWarps);
            mbarrier_set(weights_empty + i, kWarps);
        }
        mbarrier_publish();
    }

    static __device__ __forceinline__ uint32 address(const uint8* base) {
        return static_cast<uint32>(__cvta_generic_to_shared(base));
    }

    // Right operands of a stage.
    __device__ __forceinline__ uint32 queries_at(uint32 stage) const {
        return address(queries) + stage * S::KeyRows::kBytes;
    }

    __device__ __forceinline__ uint32 dout_at(uint32 stage) const {
        return address(dout) + stage * S::ValueRows::kBytes;
    }

    // This thread's first four elements of a block of p; the next four are 2 KiB further.
    __device__ __forceinline__ float4* weights_of_thread(uint32 index) const {
        return reinterpret_cast<float4*>(weights + index * S::kWeightsBytes) +
               threadIdx.x % kWarpgroup;
    }
};

struct WidePlace {
    uint32 head;  // within the launch
    uint32 batch;
    uint32 kv_head;
    int32 first_key;
    int32 first_block;  // of the queries that see some of the keys
    int32 blocks;       // end of the blocks (exclusive)
};

__device__ __forceinline__ uint32 wide_tiles(const Sizes& sizes) {
    return (sizes.keys + kWideRows - 1) / kWideRows;
}

template <typename S>
__device__ __forceinline__ WidePlace wide_place(uint32 number, const Sizes& sizes,
                                                const WideHeads& heads,
                                                const SeenKeys& seen_keys) {
    const HeadTileIndex index =
        head_tile_at(number, wide_tiles(sizes), heads.count, sizes.section_heads);
    const uint32 head = heads.first + index.head;
    const uint32 batch = head / sizes.kv_heads;
    // The most queries see the first keys, so these come first.
    const int32 first_key = index.tile * kWideRows;
    int32 queries = sizes.queries;
    if constexpr (S::kExtended) {
        const uint32 first_token = batch * sizes.keys;
        queries =
            min(queries, seen_keys.last_seeing(first_token, first_key + kWideRows - 1) + 1);
    }
    return WidePlace{index.head, batch, head - batch * sizes.kv_heads, first_key,
                     sizes.causal != 0 ? first_key / kWideRows : 0,
                     (queries + kWideRows - 1) / kWideRows};
}

// Calls `copy(query, head, row)` for each block of queries of a tile: the first query, its head and
// the index of its statistics.
template <typename Copy>
__device__ __forceinline__ void for_blocks(const WidePlace& place, const Sizes& sizes, Copy copy) {
    const uint32 group = sizes.heads / sizes.kv_heads;
    for (uint32 i = 0; i < group; ++i) {
        const uint32 head = place.kv_head * group + i;
        const uint64 rows =
            static_cast<uint64>(place.batch * sizes.heads + head) * sizes.padded_seq();
        for (int32 block = place.first_block; block < place.blocks; ++block) {
            const int32 query = block * kWideRows;
            copy(query, head, rows + query);
        }
    }
}

// Copies a stage of queries or dout, and of their statistics, by one thread.
template <typename Rows>
__device__ __forceinline__ void copy_stage(uint8* rows, float* statistics_of_stage,
                                           const TensorMap& map, const float* statistics,
                                           int32 query, uint32 head, uint32 batch, uint64* full) {
    constexpr uint32 kStatisticsBytes = kWideRows * 4;
    mbarrier_expect(full, Rows::kBytes + kStatisticsBytes);
    copy_rows<Rows>(rows, map, query, head, batch, full);
    bulk_copy(statistics_of_stage, statistics, kStatisticsBytes, full);
}

// The producer of keys and queries: one thread, which takes the tiles.
template <typename S>
__device__ __forceinline__ void produce_queries(const WideShared<S>& shared, const Maps& maps,
                                                const Statistics& statistics, const Sizes& sizes,
                                                const WideHeads& heads,
                                                const SeenKeys& seen_keys) {
    using KeyRows = typename S::KeyRows;
    const uint32 all = wide_tiles(sizes) * heads.count;
    Stage<1> own;
    Stage<S::kStages> stage;
    uint32 number = blockIdx.x;
    for (;;) {
        mbarrier_wait(shared.keys_empty, own.phase ^ 1);
        *shared.keys_tile = number;
        if (number >= all) {
            mbarrier_arrive(shared.keys_full);
            break;
        }
        const WidePlace place = wide_place<S>(number, sizes, heads, seen_keys);
        mbarrier_expect(shared.keys_full, KeyRows::kBytes);
        copy_rows<KeyRows>(shared.keys, maps.k, place.first_key, place.kv_head, place.batch,
                           shared.keys_full);
        own.advance();
        for_blocks(place, sizes, [&](int32 query, uint32 head, uint64 row) {
            mbarrier_wait(shared.queries_empty + stage.index, stage.phase ^ 1);
            copy_stage<KeyRows>(shared.queries + stage.index * KeyRows::kBytes,
                                shared.lse_log2 + stage.index * kWideRows, maps.q,
                                statistics.lse_log2 + row, query, head, place.batch,
                                shared.queries_full + stage.index);
            stage.advance();
        });
        // Not prefetched, so that the first free CTA takes the next tile.
        number = gridDim.x + atomicAdd(sizes.counters, 1u);
    }
    end_counting(sizes.counters);
}

// The producer of values and dout of the same tiles: one thread.
template <typename S>
__device__ __forceinline__ void produce_dout(const WideShared<S>& shared, const Maps& maps,
                                             const Statistics& statistics, const Sizes& sizes,
                                             const WideHeads& heads, const SeenKeys& seen_keys) {
    using ValueRows = typename S::ValueRows;
    const uint32 all = wide_tiles(sizes) * heads.count;
    Stage<1> own;
    Stage<S::kStages> stage;
    for (;;) {
        // The number is replaced after dv of this tile, which needs dout.
        mbarrier_wait(shared.keys_full, own.phase);
        const uint32 number = *shared.keys_tile;
        mbarrier_wait(shared.values_empty, own.phase ^ 1);
        *shared.values_tile = number;
        if (number >= all) {
            mbarrier_arrive(shared.values_full);
            break;
        }
        const WidePlace place = wide_place<S>(number, sizes, heads, seen_keys);
        mbarrier_expect(shared.values_full, ValueRows::kBytes);
        copy_rows<ValueRows>(shared.values, maps.v, place.first_key, place.kv_head, place.batch,
                             shared.values_full);
        own.advance();
        for_blocks(place, sizes, [&](int32 query, uint32 head, uint64 row) {
            mbarrier_wait(shared.dout_empty + stage.index, stage.phase ^ 1);
            copy_stage<ValueRows>(shared.dout + stage.index * ValueRows::kBytes,
                                  shared.delta + stage.index * kWideRows, maps.dout,
                                  statistics.delta + row, query, head, place.batch,
                                  shared.dout_full + stage.index);
            stage.advance();
        });
    }
}

}  // namespace sm90_attention
