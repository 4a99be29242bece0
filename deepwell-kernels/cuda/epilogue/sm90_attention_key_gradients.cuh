// Key gradients of attention on wgmma: dk and dv of a tile of 128 keys, summed over all queries of
// all heads that share the keys. Score gradients are stored for another kernel on request.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
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

// Key heads of a launch, of all heads of all sequences, and memory for their score gradients.
struct KeyHeads {
    uint32 first;
    uint32 count;
    StoredScores scores;
};

template <bool kTakesMore, bool kIsPart, bool kStoresScores, int kHeadElements, int kBlockQueries,
          int kSlotCount, int kStageCount>
struct KeyShape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr bool kPart = kIsPart;
    static constexpr bool kStored = kStoresScores;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kBlock = kBlockQueries;  // queries of a stage
    static_assert(!kStored || kBlock == StoredScores::kBlockRows, "stored by blocks");
    using Own = WgmmaRows<kTileRows, kHeadDim>;
    using Streamed = WgmmaRows<kBlock, kHeadDim>;
    using Shared = Layout<Own, Streamed, kSlotCount, kStageCount, kBlock>;
};

struct KeyPlace {
    uint32 head;  // within the launch
    uint32 batch;
    uint32 kv_head;
    int32 first_key;
    int32 first_block;  // of the queries that see some of the keys
    int32 blocks;       // end of the blocks (exclusive)
};

template <typename S>
__device__ __forceinline__ KeyPlace key_place(uint32 number, const Sizes& sizes,
                                              const KeyHeads& heads, const SeenKeys& seen_keys) {
    const HeadTileIndex index =
        head_tile_at(number, sizes.key_tiles(), heads.count, sizes.section_heads);
    const uint32 head = heads.first + index.head;
    const uint32 batch = head / sizes.kv_heads;
    // The most queries see the first keys, so these come first.
    const int32 first_key = index.tile * kTileRows;
    int32 queries = sizes.queries;
    if constexpr (S::kExtended) {
        const uint32 first_token = batch * sizes.keys;
        queries =
            min(queries, seen_keys.last_seeing(first_token, first_key + kTileRows - 1) + 1);
    }
    // Stored blocks come in whole tiles.
    constexpr int32 kWhole = S::kStored ? kTileRows : S::kBlock;
    return KeyPlace{index.head, batch, head - batch * sizes.kv_heads, first_key,
                    sizes.causal != 0 ? first_key / S::kBlock : 0,
                    (queries + kWhole - 1) / kWhole * (kWhole / S::kBlock)};
}

template <typename S>
__device__ __forceinline__ void produce_for_keys(const typename S::Shared& shared,
                                                 const Maps& maps, const Statistics& statistics,
                                                 const Sizes& sizes, const KeyHeads& heads,
                                                 const SeenKeys& seen_keys) {
    using Shared = typename S::Shared;
    using Streamed = typename S::Streamed;
    const uint32 all = sizes.key_tiles() * heads.count;
    const uint32 group = sizes.heads / sizes.kv_heads;
    const uint32 padded_seq = sizes.padded_seq();
    Stage<Shared::kSlots> slot;
    Stage<Shared::kStages> stage;
    uint32 number = blockIdx.x;
    for (;;) {
        mbarrier_wait(shared.own_empty + slot.index, slot.phase ^ 1);
        shared.tiles[slot.index] = number;
        uint64* own_full = shared.own_full + slot.index;
        if (number >= all) {
            mbarrier_arrive(own_full);
            break;
        }
        const KeyPlace place = key_place<S>(number, sizes, heads, seen_keys);
        copy_tile(shared, slot.index, maps.k, maps.v, place.first_key, place.kv_head, place.batch);
        slot.advance();
        for (uint32 i = 0; i < group; ++i) {
            const uint32 head = place.kv_head * group + i;
            const uint64 rows = static_cast<uint64>(place.batch * sizes.heads + head) * padded_seq;
            for (int32 block = place.first_block; block < place.blocks; ++block) {
                const int32 query = block * S::kBlock;
                mbarrier_wait(shared.empty[0] + stage.index, stage.phase ^ 1);
                uint64* full = shared.full[0] + stage.index;
                mbarrier_expect(full, Streamed::kBytes + S::kBlock * 4);
                copy_rows<Streamed>(shared.streamed[0] + stage.index * Streamed::kBytes, maps.q,
                                    query, head, place.batch, full);
                bulk_copy(shared.lse_log2 + stage.index * S::kBlock,
                          statistics.lse_log2 + rows + query, S::kBlock * 4, full);
                full = shared.full[1] + stage.index;
                mbarrier_expect(full, Streamed::kBytes + S::kBlock * 4);
                copy_rows<Streamed>(shared.streamed[1] + stage.index * Streamed::kBytes, maps.dout,
                                    query, head, place.batch, full);
                bulk_copy(shared.delta + stage.index * S::kBlock, statistics.delta + rows + query,
                          S::kBlock * 4, full);
                stage.advance();
            }
        }
        // Not prefetched, so that the first free CTA takes the next tile. Consumers still have full
        // stages.
        number = gridDim.x + atomicAdd(sizes.counters, 1u);
    }
    end_counting(sizes.counters);
}

// Place of this thread's first row of a core matrix of ds^T, for the 64 keys of a consumer and a
// block of queries. `first_tile` is the first stored tile of the query head.
__device__ __forceinline__ uint8* stored_rows(const StoredScores& scores, uint32 first_tile,
                                              const Sizes& sizes, int32 first_key, int32 block,
                                              uint32 consumer) {
    constexpr uint32 kBlocks = StoredScores::kTileRows / StoredScores::kBlockRows;
    const uint32 tile = first_tile + StoredScores::index(block / kBlocks, first_key / kTileRows,
                                                         sizes.key_tiles(), sizes.causal != 0);
    const uint32 warp = consumer * (kWarpgroup / 32) + threadIdx.x % kWarpgroup / 32;
    const uint32 lane = threadIdx.x % 32;
    return scores.bytes + static_cast<uint64>(tile) * StoredScores::kTileBytes +
           block % kBlocks * StoredScores::kBlockBytes +
           warp * 2 * StoredScores::kEightKeysBytes + lane % 4 * StoredScores::kCoreBytes +
           lane / 4 * 16;
}

// Stores ds^T of 64 keys and a block of queries, in the layout of a left operand.
template <int kSteps>
__device__ __forceinline__ void store_scores(uint8* target, const uint32 (&words)[kSteps][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<uint4*>(target + half * StoredScores::kEightKeysBytes +
                                      step * 2 * StoredScores::kCoreBytes) =
                make_uint4(words[step][half], words[step][2 + half], words[step + 1][half],
                           words[step + 1][2 + half]);
        }
    }
}

template <typename S>
__device__ __forceinline__ void sum_over_queries(const typename S::Shared& shared,
                                                 const Maps& maps, const Sizes& sizes,
                                                 const KeyHeads& heads, const SeenKeys& seen_keys,
                                                 uint32 consumer) {
    using Shared = typename S::Shared;
    using Own = typename S::Own;
    using Streamed = typename S::Streamed;
    constexpr int kSteps = S::kBlock / 16;
    const uint32 all = sizes.key_tiles() * heads.count;
    const uint32 group = sizes.heads / sizes.kv_heads;
    const float scale_log2 = sizes.scale_log2;
    const uint32 wave_offset = consumer * kWaveM * kChunkRowBytes;
    const int32 lane_row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const bool is_first_thread = threadIdx.x % kWarpgroup == 0;
    Stage<Shared::kSlots> slot;
    Stage<Shared::kStages> stage;
    Leaving leaving;

    for (;;) {
        mbarrier_wait(shared.own_full + slot.index, slot.phase);
        const uint32 number = shared.tiles[slot.index];
        if (number >= all) {
            break;
        }
        const KeyPlace place = key_place<S>(number, sizes, heads, seen_keys);
        const int32 wave_key = place.first_key + consumer * kWaveM;
        const uint32 keys_at =
            Shared::address(shared.own[0], slot.index, Own::kBytes) + wave_offset;
        const uint32 values_at =
            Shared::address(shared.own[1], slot.index, Own::kBytes) + wave_offset;
        const WgmmaMatrix keys = Own::rows(keys_at);
        const WgmmaMatrix values = Own::rows(values_at);

        float dk[S::kHeadDim / 2];
        float dv[S::kHeadDim / 2];
        set_zero(dk);
        set_zero(dv);
        // The stage read by the last sums in flight, if any.
        uint64* read = nullptr;
#pragma unroll 1
        for (uint32 i = 0; i < group; ++i) {
            const uint32 first_tile =
                (place.head * group + i) *
                StoredScores::of_head(sizes.query_tiles(), sizes.key_tiles(), sizes.causal != 0);
#pragma unroll 1
            for (int32 block = place.first_block; block < place.blocks; ++block) {
                const int32 first_query = block * S::kBlock;
                uint64* empty = shared.empty[0] + stage.index;
                const bool is_causal = sizes.causal != 0;
                mbarrier_wait(shared.full[0] + stage.index, stage.phase);
                if (is_causal && first_query + S::kBlock <= wave_key) {
                    // No query of the block sees these keys. The copies must end before the stage
                    // is released.
                    mbarrier_wait(shared.full[1] + stage.index, stage.phase);
                    release(empty);
                    stage.advance();
                    if constexpr (S::kStored) {
                        const uint32 zeros[kSteps][4] = {};
                        store_scores(stored_rows(heads.scores, first_tile, sizes,
                                                 place.first_key, block, consumer),
                                     zeros);
                    }
                    continue;
                }
                const uint32 queries_at =
                    Shared::address(shared.streamed[0], stage.index, Streamed::kBytes);
                const uint32 dout_at =
                    Shared::address(shared.streamed[1], stage.index, Streamed::kBytes);
                float p[S::kBlock / 2];
                float ds[S::kBlock / 2];
                uint32 p_words[kSteps][4];
                uint32 ds_words[kSteps][4];

                wgmma_fence();
                start_products<Own, Streamed>(p, keys, Streamed::rows(queries_at));
                // Waits for all sums of the previous block.
                wgmma_wait_for<1>(dk);
                if (read != nullptr) {
                    release(read);
                }
                read = empty;
                mbarrier_wait(shared.full[1] + stage.index, stage.phase);
                wgmma_fence();
                start_products<Own, Streamed>(ds, values, Streamed::rows(dout_at));
                float2 lse[S::kBlock / 8];
                float2 delta[S::kBlock / 8];
                read_columns(lse, shared.lse_log2 + stage.index * S::kBlock);
                read_columns(delta, shared.delta + stage.index * S::kBlock);
                if (is_first_thread) {
                    leaving.finish();
                }
                wgmma_wait_for<1>(p);
                // Stored gradients of keys beyond the sequence are multiplied by zeros and must be
                // finite.
                const bool is_cut = S::kStored && wave_key + kWaveM > sizes.keys;
                if (is_cut || (is_causal && first_query < wave_key + kWaveM - 1)) {
                    const int32 key = wave_key + lane_row;
                    const int32 hidden = is_causal ? key - first_query : -8;
                    const bool are_cut[2] = {S::kStored && key >= sizes.keys,
                                             S::kStored && key + 8 >= sizes.keys};
                    mask_first(p, {are_cut[0] ? S::kBlock : hidden,
                                   are_cut[1] ? S::kBlock : hidden + 8});
                }
                if constexpr (S::kExtended) {
                    const uint32 first_token = place.batch * sizes.keys;
                    if (first_query + S::kBlock - 1 >
                        seen_keys.last_seeing(first_token, wave_key)) {
                        const int32 key = wave_key + lane_row;
                        const int32 before = 1 - first_query;
                        mask(p, {seen_keys.last_seeing(first_token, key) + before,
                                 seen_keys.last_seeing(first_token, key + 8) + before});
                    }
                }
                weigh_columns(p, lse, scale_log2);
                to_left(p_words, p);
                wgmma_fence();
                start_weighted_sums<Streamed>(dv, p_words, Streamed::columns(dout_at));
                wgmma_wait_for<1>(ds);
                differentiate_columns(ds, p, delta);
                to_left(ds_words, ds);
                if constexpr (S::kStored) {
                    store_scores(stored_rows(heads.scores, first_tile, sizes, place.first_key,
                                             block, consumer),
                                 ds_words);
                }
                wgmma_fence();
                start_weighted_sums<Streamed>(dk, ds_words, Streamed::columns(queries_at));
                stage.advance();
            }
        }
        wgmma_wait_for<0>(dk);
        wgmma_wait_for<0>(dv);
        if (read != nullptr) {
            release(read);
        }
        if (is_first_thread) {
            leaving.finish();
        }
        // No other consumer reads these rows of keys and values.
        uint8* staged_dk = shared.own[0] + slot.index * Own::kBytes + wave_offset;
        uint8* staged_dv = shared.own[1] + slot.index * Own::kBytes + wave_offset;
        synchronize_warpgroup<kConsumers>(consumer);
        if constexpr (S::kPart) {
            if (is_first_thread) {
                mbarrier_arrive(shared.own_empty + slot.index);
            }
            maps.first_rows.store(dk, sizes.scale, wave_key, place.kv_head, place.batch);
            maps.second_rows.store(dv, 1.0f, wave_key, place.kv_head, place.batch);
        } else {
            stage_rows<Own>(staged_dv, dv, 1.0f);
            stage_rows<Own>(staged_dk, dk, sizes.scale);
            fence_before_copies();
            synchronize_warpgroup<kConsumers>(consumer);
            if (is_first_thread) {
                store_rows<Own>(maps.first, staged_dk, wave_key, place.kv_head, place.batch);
                store_rows<Own>(maps.second, staged_dv, wave_key, place.kv_head, place.batch);
                leaving.set(shared.own_empty + slot.index);
                if constexpr (Shared::kSlots == 1) {
                    leaving.finish();
                }
            }
        }
        slot.advance();
    }
    if (is_first_thread) {
        leaving.finish();
    }
}

// A CTA of a kernel, with its shared memory.
template <typename S>
__device__ __forceinline__ void make_key_gradients(uint8* memory, const Maps& maps,
                                                   const Statistics& statistics,
                                                   const Sizes& sizes, const KeyHeads& heads,
                                                   const SeenKeys& seen_keys) {
    const typename S::Shared shared(memory);
    const uint32 warp = begin_warp(shared);
    if (warp < kWarpgroup / 32) {
        keep_registers<kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            produce_for_keys<S>(shared, maps, statistics, sizes, heads, seen_keys);
        }
    } else {
        take_registers<kConsumerRegisters>();
        sum_over_queries<S>(shared, maps, sizes, heads, seen_keys, warp / (kWarpgroup / 32) - 1);
    }
}

}  // namespace sm90_attention
