// Query gradients of attention on wgmma: dq of a tile of 128 queries, summed over the keys that the
// queries see.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_gradients.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_count.cuh"
#include "scheduler/attention_order.cuh"

namespace sm90_attention {

template <bool kTakesMore, bool kIsPart, int kHeadElements, int kBlockKeys, int kSlotCount,
          int kStageCount>
struct QueryShape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr bool kPart = kIsPart;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kBlock = kBlockKeys;  // keys of a stage
    using Own = WgmmaRows<kTileRows, kHeadDim>;
    using Streamed = WgmmaRows<kBlock, kHeadDim>;
    using Shared = Layout<Own, Streamed, kSlotCount, kStageCount, 0>;
};

struct QueryPlace {
    uint32 batch;
    uint32 head;
    int32 first_query;
    int32 first_block;  // of the visible keys
    int32 blocks;       // end of the blocks (exclusive)
};

template <typename S>
__device__ __forceinline__ QueryPlace query_place(uint32 number, const Sizes& sizes,
                                                  const SeenKeys& seen_keys) {
    const uint32 tiles = sizes.query_tiles();
    const HeadTileIndex index =
        head_tile_at(number, tiles, sizes.batch * sizes.heads, sizes.section_heads);
    const uint32 batch = index.head / sizes.heads;
    // The last queries see the most keys, so they come first.
    const uint32 tile = sizes.causal != 0 ? tiles - 1 - index.tile : index.tile;
    const int32 first_query = tile * kTileRows;
    const int32 keys_seen =
        sizes.causal != 0 ? min(sizes.keys, first_query + kTileRows) : sizes.keys;
    const int32 first_seen =
        S::kExtended ? seen_keys.first_seen(batch * sizes.queries, first_query) : 0;
    return QueryPlace{batch, index.head - batch * sizes.heads, first_query,
                      max(0, first_seen) / S::kBlock,
                      (keys_seen + S::kBlock - 1) / S::kBlock};
}

template <typename S>
__device__ __forceinline__ void produce_for_queries(const typename S::Shared& shared,
                                                    const Maps& maps, const Sizes& sizes,
                                                    const SeenKeys& seen_keys) {
    using Shared = typename S::Shared;
    using Own = typename S::Own;
    using Streamed = typename S::Streamed;
    const uint32 all = sizes.query_tiles() * sizes.batch * sizes.heads;
    const uint32 group = sizes.heads / sizes.kv_heads;
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
        const QueryPlace place = query_place<S>(number, sizes, seen_keys);
        copy_tile(shared, slot.index, maps.q, maps.dout, place.first_query, place.head,
                  place.batch);
        slot.advance();
        const uint32 kv_head = place.head / group;
        for (int32 block = place.first_block; block < place.blocks; ++block) {
#pragma unroll
            for (int which = 0; which < 2; ++which) {
                mbarrier_wait(shared.empty[which] + stage.index, stage.phase ^ 1);
                uint64* full = shared.full[which] + stage.index;
                mbarrier_expect(full, Streamed::kBytes);
                copy_rows<Streamed>(shared.streamed[which] + stage.index * Streamed::kBytes,
                                    which == 0 ? maps.k : maps.v, block * S::kBlock, kv_head,
                                    place.batch, full);
            }
            stage.advance();
        }
        // Not prefetched, so that the first free CTA takes the next tile. Consumers still have full
        // stages.
        number = gridDim.x + atomicAdd(sizes.counters, 1u);
    }
    end_counting(sizes.counters);
}

template <typename S>
__device__ __forceinline__ void sum_over_keys(const typename S::Shared& shared, const Maps& maps,
                                              const Statistics& statistics, const Sizes& sizes,
                                              const SeenKeys& seen_keys, uint32 consumer) {
    using Shared = typename S::Shared;
    using Own = typename S::Own;
    using Streamed = typename S::Streamed;
    const uint32 all = sizes.query_tiles() * sizes.batch * sizes.heads;
    const int32 keys = sizes.keys;
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
        const QueryPlace place = query_place<S>(number, sizes, seen_keys);
        const int32 wave_query = place.first_query + consumer * kWaveM;
        const WgmmaMatrix queries =
            Own::rows(Shared::address(shared.own[0], slot.index, Own::kBytes) + wave_offset);
        const WgmmaMatrix dout =
            Own::rows(Shared::address(shared.own[1], slot.index, Own::kBytes) + wave_offset);
        const uint64 row = static_cast<uint64>(place.batch * sizes.heads + place.head) *
                               sizes.padded_seq() +
                           wave_query + lane_row;
        const float lse_log2[2] = {statistics.lse_log2[row], statistics.lse_log2[row + 8]};
        const float delta[2] = {statistics.delta[row], statistics.delta[row + 8]};

        float dq[S::kHeadDim / 2];
        set_zero(dq);
        // The keys read by the last sums in flight, if any.
        uint64* read = nullptr;
#pragma unroll 1
        for (int32 block = place.first_block; block < place.blocks; ++block) {
            const uint32 keys_at =
                Shared::address(shared.streamed[0], stage.index, Streamed::kBytes);
            const uint32 values_at =
                Shared::address(shared.streamed[1], stage.index, Streamed::kBytes);
            float p[S::kBlock / 2];
            float ds[S::kBlock / 2];
            uint32 ds_words[S::kBlock / 16][4];

            mbarrier_wait(shared.full[0] + stage.index, stage.phase);
            wgmma_fence();
            start_products<Own, Streamed>(p, queries, Streamed::rows(keys_at));
            // Waits for the sums of the previous block.
            wgmma_wait_for<1>(dq);
            if (read != nullptr) {
                release(read);
            }
            read = shared.empty[0] + stage.index;
            mbarrier_wait(shared.full[1] + stage.index, stage.phase);
            wgmma_fence();
            start_products<Own, Streamed>(ds, dout, Streamed::rows(values_at));
            if (is_first_thread) {
                leaving.finish();
            }
            wgmma_wait_for<1>(p);
            const int32 first_key = block * S::kBlock;
            const int32 all_see = sizes.causal != 0 ? min(keys, wave_query + 1) : keys;
            if (first_key + S::kBlock > all_see) {
                const int32 query = wave_query + lane_row;
                mask(p, {(sizes.causal != 0 ? min(keys, query + 1) : keys) - first_key,
                         (sizes.causal != 0 ? min(keys, query + 9) : keys) - first_key});
            }
            if constexpr (S::kExtended) {
                const uint32 first_token = place.batch * keys;
                if (first_key < seen_keys.first_seen(first_token, wave_query + kWaveM - 1)) {
                    const int32 query = wave_query + lane_row;
                    mask_first(p, {seen_keys.first_seen(first_token, query) - first_key,
                                   seen_keys.first_seen(first_token, query + 8) - first_key});
                }
            }
            weigh_rows(p, lse_log2, scale_log2);
            wgmma_wait_for<0>(ds);
            release(shared.empty[1] + stage.index);
            differentiate_rows(ds, p, delta);
            to_left(ds_words, ds);
            wgmma_fence();
            start_weighted_sums<Streamed>(dq, ds_words, Streamed::columns(keys_at));
            stage.advance();
        }
        wgmma_wait_for<0>(dq);
        if (read != nullptr) {
            release(read);
        }
        if (is_first_thread) {
            leaving.finish();
        }
        // Only this consumer reads these rows of queries.
        uint8* staged = shared.own[0] + slot.index * Own::kBytes + wave_offset;
        synchronize_warpgroup<kConsumers>(consumer);
        if constexpr (S::kPart) {
            if (is_first_thread) {
                mbarrier_arrive(shared.own_empty + slot.index);
            }
            maps.first_rows.store(dq, sizes.scale, wave_query, place.head, place.batch);
        } else {
            stage_rows<Own>(staged, dq, sizes.scale);
            fence_before_copies();
            synchronize_warpgroup<kConsumers>(consumer);
            if (is_first_thread) {
                store_rows<Own>(maps.first, staged, wave_query, place.head, place.batch);
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

template <typename S>
__device__ __forceinline__ void make_query_gradients(uint8* memory, const Maps& maps,
                                                     const Statistics& statistics,
                                                     const Sizes& sizes,
                                                     const SeenKeys& seen_keys) {
    const typename S::Shared shared(memory);
    const uint32 warp = begin_warp(shared);
    if (warp < kWarpgroup / 32) {
        keep_registers<kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            produce_for_queries<S>(shared, maps, sizes, seen_keys);
        }
    } else {
        take_registers<kConsumerRegisters>();
        sum_over_keys<S>(shared, maps, statistics, sizes, seen_keys,
                         warp / (kWarpgroup / 32) - 1);
    }
}

}  // namespace sm90_attention
