// Query gradients of attention on wgmma from stored score gradients (layout/stored_scores.cuh):
// dq = scale ds k. Bound by memory: 32 KiB of ds are read for 2 x 128^2 D operations.
#pragma once

#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "layout/stored_scores.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_gradients.cuh"
#include "mma/sm90_attention_part_rows.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "scheduler/attention_order.cuh"

namespace sm90_attention {

// Two consumers of 64 queries each; one of their threads issues the copies, so that there are
// registers for two CTAs per SM.
constexpr int kSumThreads = kConsumers * kWarpgroup;
constexpr int kSumCtas = 2;

template <bool kIsPart, int kHeadElements, int kStageCount>
struct SumShape {
    static constexpr bool kPart = kIsPart;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kKeys = 64;  // of a stage
    static constexpr int kStages = kStageCount;
    using Keys = WgmmaRows<kKeys, kHeadDim>;
    using Result = WgmmaRows<kWaveM, kHeadDim>;
    // ds of the keys of a stage and of the queries of a consumer.
    static constexpr uint32 kScoresBytes = kKeys / 8 * StoredScores::kEightKeysBytes;
    static constexpr uint32 kStageBytes = kConsumers * kScoresBytes + Keys::kBytes;
    static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 256;
    static_assert(Result::kBytes <= kStageBytes && kStages >= kConsumers, "room for results");
    static_assert(kSumCtas * (kSharedBytes + 1024) <= 228 * 1024, "CTAs of an SM");

    uint8* stages;
    uint64* full;
    uint64* empty;

    __device__ __forceinline__ explicit SumShape(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        stages = memory + (-address & 1023);
        full = reinterpret_cast<uint64*>(stages + kStages * kStageBytes);
        empty = full + kStages;
    }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_set(full + i);
            mbarrier_set(empty + i, kConsumers * kWarpgroup / 32);
        }
        mbarrier_publish();
    }
};

// A tile of queries, and the stages of keys that its queries see.
struct SumPlace {
    uint32 head;  // within the launch
    uint32 batch;
    uint32 query_head;
    uint32 tile;
    uint32 stages;
};

template <typename S>
__device__ __forceinline__ SumPlace sum_place(const Sizes& sizes, const KeyHeads& heads) {
    const uint32 tiles = sizes.query_tiles();
    const uint32 group = sizes.heads / sizes.kv_heads;
    const uint32 count = heads.count * group;
    // The last queries see the most keys, so they come first.
    const HeadTileIndex index = head_tile_at(blockIdx.x, tiles, count, count);
    const bool is_causal = sizes.causal != 0;
    const uint32 tile = is_causal ? tiles - 1 - index.tile : index.tile;
    const uint32 head = heads.first * group + index.head;
    const uint32 batch = head / sizes.heads;
    const int32 keys = is_causal ? min(sizes.keys, (tile + 1) * kTileRows) : sizes.keys;
    return SumPlace{index.head, batch, head - batch * sizes.heads, tile,
                    static_cast<uint32>(keys + S::kKeys - 1) / S::kKeys};
}

// Source of the stages of a tile.
template <typename S>
struct SumStages {
    const uint8* scores;  // of the tile's queries
    const TensorMap& k;
    uint32 kv_head;
    uint32 batch;

    __device__ __forceinline__ SumStages(const TensorMap& map, const Sizes& sizes,
                                         const KeyHeads& heads, const SumPlace& place)
        : k(map), kv_head(place.query_head / (sizes.heads / sizes.kv_heads)), batch(place.batch) {
        const uint32 key_tiles = sizes.key_tiles();
        const bool is_causal = sizes.causal != 0;
        const uint32 first_tile =
            place.head * StoredScores::of_head(sizes.query_tiles(), key_tiles, is_causal) +
            StoredScores::index(place.tile, 0, key_tiles, is_causal);
        scores = heads.scores.bytes + static_cast<uint64>(first_tile) * StoredScores::kTileBytes;
    }

    // By one thread: copies the `number`-th stage to an empty stage of shared memory.
    __device__ __forceinline__ void copy(const S& shared, uint32 number, uint32 index) const {
        constexpr uint32 kOfTile = StoredScores::kTileRows / S::kKeys;
        uint64* full = shared.full + index;
        mbarrier_expect(full, S::kStageBytes);
        const uint8* source = scores + number / kOfTile * StoredScores::kTileBytes +
                              number % kOfTile * S::kScoresBytes;
        uint8* target = shared.stages + index * S::kStageBytes;
#pragma unroll
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            bulk_copy(target + consumer * S::kScoresBytes,
                      source + consumer * StoredScores::kBlockBytes, S::kScoresBytes, full);
        }
        copy_rows<typename S::Keys>(target + kConsumers * S::kScoresBytes, k, number * S::kKeys,
                                    kv_head, batch, full);
    }
};

// Starts the GEMM of a stage, as one wgmma group, once the stage is full.
template <typename S, bool kAdd>
__device__ __forceinline__ void start_sums(float (&dq)[S::kHeadDim / 2], const S& shared,
                                           const Stage<S::kStages>& stage, uint32 consumer) {
    using Keys = typename S::Keys;
    mbarrier_wait(shared.full + stage.index, stage.phase);
    const uint32 address = static_cast<uint32>(
        __cvta_generic_to_shared(shared.stages + stage.index * S::kStageBytes));
    const WgmmaMatrix scores = StoredScores::columns(address + consumer * S::kScoresBytes);
    const WgmmaMatrix keys = Keys::columns(address + kConsumers * S::kScoresBytes);
    wgmma_fence();
    wgmma_bf16<kAdd, true, true>(dq, scores.at(0), keys.at(0));
#pragma unroll
    for (int step = 1; step < S::kKeys / 16; ++step) {
        wgmma_bf16<true, true, true>(dq, scores.at(StoredScores::key_step(step)),
                                     keys.at(Keys::row_step(step)));
    }
    wgmma_commit();
}

// Stores dq of a consumer's queries through shared memory.
template <typename S>
__device__ __forceinline__ void stage_and_store(const S& shared,
                                                const float (&dq)[S::kHeadDim / 2],
                                                const TensorMap& map, const Sizes& sizes,
                                                const SumPlace& place, uint32 consumer) {
    using Result = typename S::Result;
    constexpr uint32 kBothConsumers = 1;  // barrier number
    // No more copies are in flight, and no consumer reads a stage after the barrier.
    barrier_sync(kBothConsumers, kConsumers * kWarpgroup);
    uint8* staged = shared.stages + consumer * S::kStageBytes;
    const uint32 row = accumulator_row();
    stage_rows<Result>(staged, dq, sizes.scale,
                       {StoredScores::query(row), StoredScores::query(row + 8)});
    fence_before_copies();
    synchronize_warpgroup<kConsumers>(consumer);
    if (threadIdx.x % kWarpgroup == 0) {
        store_rows<Result>(map, staged, place.tile * kTileRows + consumer * kWaveM,
                           place.query_head, place.batch);
        tensor_store_commit();
        tensor_store_wait_read();
    }
}

// Where dq goes: through a tensor map, or, for parts, as FP32 rows.
struct SumResults {
    const TensorMap& map;
    PartRows rows = {};
};

template <typename S>
__device__ __forceinline__ void sum_scores(const S& shared, const SumStages<S>& stages,
                                           const SumResults& results, const Sizes& sizes,
                                           const SumPlace& place, uint32 warp) {
    const uint32 consumer = warp / (kWarpgroup / 32);
    if (warp == 0 && elect_one()) {
        for (uint32 i = 0; i < min(place.stages, static_cast<uint32>(S::kStages)); ++i) {
            stages.copy(shared, i, i);
        }
    }
    __syncwarp();
    float dq[S::kHeadDim / 2];
    Stage<S::kStages> stage;
    start_sums<S, false>(dq, shared, stage, consumer);
#pragma unroll 1
    for (uint32 i = 1; i < place.stages; ++i) {
        const Stage<S::kStages> read = stage;
        stage.advance();
        start_sums<S, true>(dq, shared, stage, consumer);
        wgmma_wait_for<1>(dq);
        release(shared.empty + read.index);
        const uint32 next = i - 1 + S::kStages;
        if (warp == 0 && next < place.stages && elect_one()) {
            mbarrier_wait(shared.empty + read.index, read.phase);
            stages.copy(shared, next, read.index);
        }
        __syncwarp();
    }
    wgmma_wait_for<0>(dq);
    if constexpr (S::kPart) {
        const uint32 row = accumulator_row();
        const uint32 first = place.tile * kTileRows + consumer * kWaveM;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            results.rows.store_row(dq, half, sizes.scale,
                                   first + StoredScores::query(row + 8 * half),
                                   place.query_head, place.batch);
        }
    } else {
        stage_and_store<S>(shared, dq, results.map, sizes, place, consumer);
    }
}

template <typename S>
__device__ __forceinline__ void sum_stored_scores(uint8* memory, const TensorMap& k,
                                                  const SumResults& results, const Sizes& sizes,
                                                  const KeyHeads& heads) {
    const S shared(memory);
    const uint32 warp = begin_warp(shared);
    const SumPlace place = sum_place<S>(sizes, heads);
    sum_scores(shared, SumStages<S>(k, sizes, heads, place), results, sizes, place, warp);
}

}  // namespace sm90_attention
