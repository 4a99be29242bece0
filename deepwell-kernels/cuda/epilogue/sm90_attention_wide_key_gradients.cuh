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
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_count.cuh"
#include "scheduler/sm90_attention_wide_tiles.cuh"

namespace sm90_attention {

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
