// Key gradients of attention with wide heads on wgmma: dk and dv of a tile of 64 keys, summed over
// all queries of all heads that share the keys, and score gradients for another kernel.
//
// A CTA has one producer and two consumer warpgroups. One consumer computes p and dv, the other ds
// and dk, so that a thread has the sums of one gradient in registers, p and ds are left operands in
// registers, and each stage is read once per GEMM. p is passed in FP32 through shared memory, from
// each thread to the thread with the same place in the other consumer. Two warps of the producer
// copy keys and queries, and values and dout, so that no copy waits for room for another. The
// consumer of p is up to two blocks ahead of the other, also from one tile to the next.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "layout/score_gradients.cuh"
#include "layout/stored_scores.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_gradients.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_count.cuh"
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

// Hides scores of a block of queries from the keys that these queries do not see. Weights of keys
// beyond the sequence are multiplied by zeros and must be finite.
template <typename S>
__device__ __forceinline__ void hide_scores(float (&scores)[kWideRows / 2], const Sizes& sizes,
                                            const WidePlace& place, int32 first_query,
                                            const SeenKeys& seen_keys) {
    const int32 key = place.first_key + static_cast<int32>(accumulator_row());
    const bool is_causal = sizes.causal != 0;
    const bool is_cut = place.first_key + kWideRows > sizes.keys;
    if (is_cut || (is_causal && first_query < place.first_key + kWideRows - 1)) {
        const int32 hidden = is_causal ? key - first_query : -8;
        mask_first(scores, {key >= sizes.keys ? kWideRows : hidden,
                            key + 8 >= sizes.keys ? kWideRows : hidden + 8});
    }
    if constexpr (S::kExtended) {
        const uint32 first_token = place.batch * sizes.keys;
        if (first_query + kWideRows - 1 > seen_keys.last_seeing(first_token, place.first_key)) {
            const int32 before = 1 - first_query;
            mask(scores, {seen_keys.last_seeing(first_token, key) + before,
                          seen_keys.last_seeing(first_token, key + 8) + before});
        }
    }
}

// Stores 64 rows of a result through the shared memory of an operand that only this consumer reads,
// and returns the memory to the producer.
template <typename Rows, int kCount>
__device__ __forceinline__ void store_wide(uint8* staged, const float (&sums)[kCount], float scale,
                                           const TensorMap& map, const WidePlace& place,
                                           uint64* empty, uint32 consumer) {
    // redundant bar.sync: of a left operand, a warp reads only the rows that it overwrites
    synchronize_warpgroup<kConsumers>(consumer);
    stage_rows<Rows>(staged, sums, scale);
    fence_before_copies();
    synchronize_warpgroup<kConsumers>(consumer);
    if (threadIdx.x % kWarpgroup == 0) {
        store_rows<Rows>(map, staged, place.first_key, place.kv_head, place.batch);
        tensor_store_commit();
        tensor_store_wait_read();
        mbarrier_arrive(empty);
    }
}

// The consumer of p and dv.
template <typename S>
__device__ __forceinline__ void sum_value_gradients(const WideShared<S>& shared, const Maps& maps,
                                                    const Sizes& sizes, const WideHeads& heads,
                                                    const SeenKeys& seen_keys) {
    using KeyRows = typename S::KeyRows;
    using ValueRows = typename S::ValueRows;
    constexpr uint32 kConsumer = 0;
    constexpr int kSteps = kWideRows / 16;
    const uint32 all = wide_tiles(sizes) * heads.count;
    const uint32 group = sizes.heads / sizes.kv_heads;
    const WgmmaMatrix keys = KeyRows::rows(WideShared<S>::address(shared.keys));
    Stage<1> own;
    Stage<S::kStages> stage;
    Stage<S::kWeights> weights;

    for (;;) {
        mbarrier_wait(shared.keys_full, own.phase);
        const uint32 number = *shared.keys_tile;
        if (number >= all) {
            break;
        }
        const WidePlace place = wide_place<S>(number, sizes, heads, seen_keys);
        float dv[S::kValueDim / 2];
        set_zero(dv);
        // The stage read by the sums in flight, if any.
        uint64* read = nullptr;
#pragma unroll 1
        for (uint32 i = 0; i < group; ++i) {
#pragma unroll 1
            for (int32 block = place.first_block; block < place.blocks; ++block) {
                float p[kWideRows / 2];
                uint32 words[kSteps][4];
                mbarrier_wait(shared.queries_full + stage.index, stage.phase);
                wgmma_fence();
                start_products<KeyRows, KeyRows>(
                    p, keys, KeyRows::rows(shared.queries_at(stage.index)));
                float2 lse[kWideRows / 8];
                read_columns(lse, shared.lse_log2 + stage.index * kWideRows);
                // Waits for the sums of the previous block.
                wgmma_wait_for<1>(dv);
                if (read != nullptr) {
                    // redundant bar.warp.sync: all lanes waited for the wgmma that read it
                    release(read);
                }
                read = shared.dout_empty + stage.index;
                wgmma_wait_for<0>(p);
                // redundant bar.warp.sync: all lanes read lse before the wait above
                release(shared.queries_empty + stage.index);
                hide_scores<S>(p, sizes, place, block * kWideRows, seen_keys);
                weigh_columns(p, lse, sizes.scale_log2);
                mbarrier_wait(shared.weights_empty + weights.index, weights.phase ^ 1);
                float4* passed = shared.weights_of_thread(weights.index);
#pragma unroll
                for (int four = 0; four < kWideRows / 8; ++four) {
                    passed[four * kWarpgroup] = make_float4(p[4 * four], p[4 * four + 1],
                                                            p[4 * four + 2], p[4 * four + 3]);
                }
                release(shared.weights_full + weights.index);
                weights.advance();
                to_left(words, p);
                mbarrier_wait(shared.dout_full + stage.index, stage.phase);
                wgmma_fence();
                start_weighted_sums<ValueRows>(
                    dv, words, ValueRows::columns(shared.dout_at(stage.index)));
                stage.advance();
            }
        }
        wgmma_wait_for<0>(dv);
        if (read != nullptr) {
            // redundant bar.warp.sync: all lanes waited for the wgmma that read it
            release(read);
        }
        store_wide<ValueRows>(shared.keys, dv, 1.0f, maps.second, place, shared.keys_empty,
                              kConsumer);
        own.advance();
    }
}

// Place of this thread's first row of a core matrix of ds^T, for 64 keys and a block of queries.
__device__ __forceinline__ uint8* wide_rows(const ScoreGradients& scores, uint32 query_head,
                                            int32 first_key, int32 block) {
    constexpr int32 kBlocks = StoredScores::kTileRows / StoredScores::kBlockRows;
    static_assert(StoredScores::kTileBytes == ScoreGradients::kTileBytes, "tiles of one size");
    const uint32 lane = threadIdx.x % 32;
    const uint32 eights =
        first_key % kTileRows / 8 + threadIdx.x % kWarpgroup / 32 * 2;  // of keys
    return scores.tile(query_head, block / kBlocks, first_key / kTileRows) +
           block % kBlocks * StoredScores::kBlockBytes + eights * StoredScores::kEightKeysBytes +
           lane % 4 * StoredScores::kCoreBytes + lane / 4 * 16;
}

// The other kernel reads tiles of 128 queries: stores zeros for a block of 64 of these that sees
// none of the keys.
__device__ __forceinline__ void store_unseen(const ScoreGradients& scores, uint32 query_head,
                                             const WidePlace& place, bool is_causal) {
    const uint32 zeros[kWideRows / 16][4] = {};
    if (is_causal && place.first_block % 2 != 0) {
        store_scores(wide_rows(scores, query_head, place.first_key, place.first_block - 1), zeros);
    }
    if (place.blocks % 2 != 0) {
        store_scores(wide_rows(scores, query_head, place.first_key, place.blocks), zeros);
    }
}

// The consumer of ds and dk.
template <typename S>
__device__ __forceinline__ void sum_wide_key_gradients(const WideShared<S>& shared,
                                                       const Maps& maps, const Sizes& sizes,
                                                       const WideHeads& heads,
                                                       const SeenKeys& seen_keys) {
    using KeyRows = typename S::KeyRows;
    using ValueRows = typename S::ValueRows;
    constexpr uint32 kConsumer = 1;
    constexpr int kSteps = kWideRows / 16;
    const uint32 all = wide_tiles(sizes) * heads.count;
    const uint32 group = sizes.heads / sizes.kv_heads;
    const WgmmaMatrix values = ValueRows::rows(WideShared<S>::address(shared.values));
    Stage<1> own;
    Stage<S::kStages> stage;
    Stage<S::kWeights> weights;

    for (;;) {
        mbarrier_wait(shared.values_full, own.phase);
        const uint32 number = *shared.values_tile;
        if (number >= all) {
            break;
        }
        const WidePlace place = wide_place<S>(number, sizes, heads, seen_keys);
        float dk[S::kKeyDim / 2];
        set_zero(dk);
        // The stage read by the sums in flight, if any.
        uint64* read = nullptr;
#pragma unroll 1
        for (uint32 i = 0; i < group; ++i) {
            const uint32 query_head = place.head * group + i;
            store_unseen(heads.scores, query_head, place, sizes.causal != 0);
#pragma unroll 1
            for (int32 block = place.first_block; block < place.blocks; ++block) {
                float p[kWideRows / 2];
                float ds[kWideRows / 2];
                uint32 words[kSteps][4];
                mbarrier_wait(shared.dout_full + stage.index, stage.phase);
                wgmma_fence();
                start_products<ValueRows, ValueRows>(
                    ds, values, ValueRows::rows(shared.dout_at(stage.index)));
                float2 delta[kWideRows / 8];
                read_columns(delta, shared.delta + stage.index * kWideRows);
                // Waits for the sums of the previous block.
                wgmma_wait_for<1>(dk);
                if (read != nullptr) {
                    // redundant bar.warp.sync: all lanes waited for the wgmma that read it
                    release(read);
                }
                read = shared.queries_empty + stage.index;
                wgmma_wait_for<0>(ds);
                release(shared.dout_empty + stage.index);
                mbarrier_wait(shared.weights_full + weights.index, weights.phase);
                const float4* passed = shared.weights_of_thread(weights.index);
#pragma unroll
                for (int four = 0; four < kWideRows / 8; ++four) {
                    const float4 values_of_p = passed[four * kWarpgroup];
                    p[4 * four] = values_of_p.x;
                    p[4 * four + 1] = values_of_p.y;
                    p[4 * four + 2] = values_of_p.z;
                    p[4 * four + 3] = values_of_p.w;
                }
                release(shared.weights_empty + weights.index);
                weights.advance();
                differentiate_columns(ds, p, delta);
                to_left(words, ds);
                // redundant mbarrier.wait: p arrives after the queries that it is computed from
                mbarrier_wait(shared.queries_full + stage.index, stage.phase);
                wgmma_fence();
                start_weighted_sums<KeyRows>(dk, words,
                                             KeyRows::columns(shared.queries_at(stage.index)));
                store_scores(wide_rows(heads.scores, query_head, place.first_key, block), words);
                stage.advance();
            }
        }
        wgmma_wait_for<0>(dk);
        if (read != nullptr) {
            // redundant bar.warp.sync: all lanes waited for the wgmma that read it
            release(read);
        }
        store_wide<KeyRows>(shared.values, dk, sizes.scale, maps.first, place, shared.values_empty,
                            kConsumer);
        own.advance();
    }
}

// A CTA of a kernel, with its shared memory.
template <typename S>
__device__ __forceinline__ void make_wide_key_gradients(uint8* memory, const Maps& maps,
                                                        const Statistics& statistics,
                                                        const Sizes& sizes,
                                                        const WideHeads& heads,
                                                        const SeenKeys& seen_keys) {
    const WideShared<S> shared(memory);
    const uint32 warp = begin_warp(shared);
    if (warp < kWarpgroup / 32) {
        keep_registers<kWideProducerRegisters>();
        if (warp == 0 && elect_one()) {
            produce_queries(shared, maps, statistics, sizes, heads, seen_keys);
        } else if (warp == 1 && elect_one()) {
            produce_dout(shared, maps, statistics, sizes, heads, seen_keys);
        }
    } else {
        take_registers<kWideConsumerRegisters>();
        if (warp < 2 * kWarpgroup / 32) {
            sum_value_gradients(shared, maps, sizes, heads, seen_keys);
        } else {
            sum_wide_key_gradients(shared, maps, sizes, heads, seen_keys);
        }
    }
}

}  // namespace sm90_attention
