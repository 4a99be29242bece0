// dq of attention on tcgen05: of 256 queries of a head, from stored score gradients. A stage of
// shared memory has 64 keys, and the score gradients of these keys and of two tiles of queries.
#pragma once

#include "common/types.cuh"
#include "epilogue/sm100_attention_gradients.cuh"
#include "layout/score_gradients.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm100_attention_backward_tile.cuh"
#include "mma/sm100_tile.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special_register.cuh"
#include "ptx/tcgen05.cuh"
#include "scheduler/sm100_attention_backward_tiles.cuh"

namespace sm100_attention_backward {

using sm100::PipelineState;

// Warps: four for each tile of queries write results; one for MMAs, one for copies.
constexpr int kQueryTiles = 2;
constexpr int kSumMmaWarp = kQueryTiles * kWarpgroupWarps;
constexpr int kSumProducerWarp = kSumMmaWarp + 1;
constexpr int kSumThreads = 32 * (kSumProducerWarp + 1);

template <bool kTakesMore, int kHeadElements, int kStageCount>
struct SumShape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kStages = kStageCount;
    static constexpr int kStageKeys = 64;
    static constexpr int kStagesOfTile = kTileRows / kStageKeys;
    using Keys = WgmmaRows<kStageKeys, kHeadDim>;
    // Score gradients of a stage's keys and a tile of queries.
    static constexpr uint32 kScoreBytes = kStageKeys / 8 * ScoreGradients::kEightKeysBytes;
    static constexpr uint32 kStageBytes = kQueryTiles * kScoreBytes + Keys::kBytes;
    static constexpr int kSharedBytes = kStages * kStageBytes + (2 * kStages + 1) * 8 + 8;
    static_assert(kSharedBytes <= kSharedLimit, "what a CTA may have");
    static_assert(kSumMmaWarp * WarpRows<kHeadDim>::kBytes <= kStages * kStageBytes,
                  "room for results");
};

template <typename S>
struct SumShared {
    uint8* stages;  // [kStages], each score gradients of two tiles of queries, and keys
    uint64* full;   // [kStages]
    uint64* empty;  // [kStages]
    uint64* sums_full;
    uint32* tensor_base;

    __device__ __forceinline__ explicit SumShared(uint8* memory) {
        stages = memory;
        full = reinterpret_cast<uint64*>(stages + S::kStages * S::kStageBytes);
        empty = full + S::kStages;
        sums_full = empty + S::kStages;
        tensor_base = reinterpret_cast<uint32*>(sums_full + 1);
    }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(full + i);
            mbarrier_set(empty + i);
        }
        mbarrier_set(sums_full);
        mbarrier_publish();
    }
};

// Two tiles of queries, and the tiles of keys that either sees.
struct QueryPair {
    uint32 head;  // within the launch
    uint32 batch;
    uint32 query_head;
    int32 first_tile;
    TileRange keys[kQueryTiles];

    // Tiles of keys of both: each tile of queries sees its own keys, or all, so there is no gap.
    __device__ __forceinline__ TileRange all_keys() const {
        return TileRange{keys[0].begin, keys[1].begin < keys[1].end ? keys[1].end : keys[0].end};
    }
};

template <bool kExtended>
__device__ __forceinline__ QueryPair query_pair(const Arguments& arguments) {
    const uint32 pairs = (arguments.tiles() + kQueryTiles - 1) / kQueryTiles;
    const uint32 group = arguments.group();
    const HeadTileIndex index = head_tile_at(blockIdx.x, pairs, arguments.head_count * group,
                                             arguments.section_heads * group);
    QueryPair pair;
    pair.head = index.head;
    const uint32 head = arguments.first_head * group + index.head;
    pair.batch = head / arguments.heads;
    pair.query_head = head - pair.batch * arguments.heads;
    // The last queries see the most keys, so they come first.
    pair.first_tile =
        (arguments.causal != 0 ? pairs - 1 - index.tile : index.tile) * kQueryTiles;
#pragma unroll
    for (int i = 0; i < kQueryTiles; ++i) {
        pair.keys[i] = seen_tiles<kExtended>(arguments, pair.batch, pair.first_tile + i);
    }
    return pair;
}

// The producer: one thread.
template <typename S>
__device__ __forceinline__ void copy_stages(const SumShared<S>& shared, const TensorMap& k,
                                            const Arguments& arguments, const QueryPair& pair) {
    const uint32 kv_head = pair.query_head / arguments.group();
    const ScoreGradients gradients = arguments.score_gradients();
    const TileRange all = pair.all_keys();
    PipelineState<S::kStages> stage;
#pragma unroll 1
    for (int32 i = all.begin * S::kStagesOfTile; i < all.end * S::kStagesOfTile; ++i) {
        const int32 key_tile = i / S::kStagesOfTile;
        const uint32 in_tile = i % S::kStagesOfTile * S::kScoreBytes;
        uint8* target = shared.stages + stage.index * S::kStageBytes;
        uint64* full = shared.full + stage.index;
        mbarrier_wait(shared.empty + stage.index, stage.phase ^ 1);
        const uint32 count = pair.keys[0].has(key_tile) + pair.keys[1].has(key_tile);
        // redundant release of mbarrier.arrive: the arrival publishes no writes of this thread
        mbarrier_expect(full, S::Keys::kBytes + count * S::kScoreBytes);
#pragma unroll
        for (int of = 0; of < kQueryTiles; ++of) {
            if (pair.keys[of].has(key_tile)) {
                bulk_copy(target + of * S::kScoreBytes,
                          gradients.tile(pair.head, pair.first_tile + of, key_tile) + in_tile,
                          S::kScoreBytes, full);
            }
        }
        copy_rows<typename S::Keys>(target + kQueryTiles * S::kScoreBytes, k, i * S::kStageKeys,
                                    kv_head, pair.batch, full);
        stage.advance();
    }
}

// The MMA warp: one thread.
template <typename S>
__device__ __forceinline__ void multiply_stages(const SumShared<S>& shared, uint32 tensor_base,
                                                const QueryPair& pair) {
    using Keys = typename S::Keys;
    constexpr uint32 kInstruction =
        tcgen05_bf16_instruction(kTileRows, S::kHeadDim, false, false);
    const TileRange all = pair.all_keys();
    PipelineState<S::kStages> stage;
#pragma unroll 1
    for (int32 i = all.begin * S::kStagesOfTile; i < all.end * S::kStagesOfTile; ++i) {
        const int32 key_tile = i / S::kStagesOfTile;
        const uint32 at = static_cast<uint32>(__cvta_generic_to_shared(shared.stages)) +
                          stage.index * S::kStageBytes;
        const Tcgen05Matrices keys(
            tcgen05_transposed_matrix(at + kQueryTiles * S::kScoreBytes, Keys::kChunkBytes));
        mbarrier_wait(shared.full + stage.index, stage.phase);
#pragma unroll
        for (int of = 0; of < kQueryTiles; ++of) {
            if (pair.keys[of].has(key_tile)) {
                const bool is_first = i == pair.keys[of].begin * S::kStagesOfTile;
                const Tcgen05Matrices scores(ScoreGradients::columns(at + of * S::kScoreBytes));
#pragma unroll
                for (int step = 0; step < S::kStageKeys / 16; ++step) {
                    // redundant leading offset of B: unused in the single box of a head of 64
                    tcgen05_multiply_f16<1>(tensor_base + of * S::kHeadDim,
                                            scores.at(ScoreGradients::key_step(step)),
                                            keys.at(Keys::row_step(step)), kInstruction,
                                            !is_first || step > 0);
                }
            }
        }
        if (i + 1 < all.end * S::kStagesOfTile) {
            tcgen05_commit(shared.empty + stage.index);
        }
        stage.advance();
    }
    tcgen05_commit(shared.sums_full);
}

// The warps of a tile of queries.
template <typename S>
__device__ __forceinline__ void write_queries(const SumShared<S>& shared, uint32 tensor_base,
                                              const TensorMap& dq, const Arguments& arguments,
                                              const QueryPair& pair, uint32 warp) {
    const uint32 of = warp / kWarpgroupWarps;
    const int32 tile = pair.first_tile + of;
    if (tile >= static_cast<int32>(arguments.tiles())) {
        return;
    }
    mbarrier_wait_once(shared.sums_full);
    tcgen05_fence_after_barrier();
    // No MMA reads the stages any more.
    uint8* staged = shared.stages + warp * WarpRows<S::kHeadDim>::kBytes;
    stage_sums<S::kHeadDim>(staged, lanes_of_warp(tensor_base, warp) + of * S::kHeadDim,
                            arguments.scale,
                            ScoreGradients::query(thread_index_again() % 32));
    fence_before_copies();
    __syncwarp();
    if (elect_one()) {
        store_rows<S::kHeadDim>(dq, staged, tile * kTileRows + warp % kWarpgroupWarps * 32,
                                pair.query_head, pair.batch);
        tensor_store_wait_read();
    }
}

// A CTA of a kernel, with its shared memory.
template <typename S>
__device__ __forceinline__ void make_query_gradients(uint8* memory, const TensorMap& k,
                                                     const TensorMap& dq,
                                                     const Arguments& arguments) {
    const SumShared<S> shared(memory);
    const uint32 warp = begin(shared, memory, kSumProducerWarp, kSumMmaWarp);
    const uint32 tensor_base = *shared.tensor_base;
    const QueryPair pair = query_pair<S::kExtended>(arguments);
    if (warp < kSumMmaWarp) {
        write_queries(shared, tensor_base, dq, arguments, pair, warp);
    } else if (warp == kSumMmaWarp) {
        if (elect_one()) {
            multiply_stages(shared, tensor_base, pair);
        }
    } else if (elect_one()) {
        copy_stages(shared, k, arguments, pair);
    }
    end(tensor_base, kSumMmaWarp);
}

}  // namespace sm100_attention_backward
