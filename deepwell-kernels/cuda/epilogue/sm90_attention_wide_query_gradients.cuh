// Query gradients of attention with wide heads on wgmma, dq = scale ds k from stored score
// gradients, by the loop of epilogue/sm90_attention_score_sums.cuh. A consumer has 64 queries and
// all columns of their sums, half of a thread's registers, so an SM has one CTA.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_score_sums.cuh"
#include "layout/score_gradients.cuh"
#include "layout/stored_scores.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/sm90_attention_wide_tiles.cuh"

namespace sm90_attention {

template <bool kTakesMore, int kHeadElements, int kStageCount>
struct WideSumShape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr bool kPart = false;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kKeys = kWideRows;  // of a stage
    static constexpr int kStages = kStageCount;
    using Keys = WgmmaRows<kKeys, kHeadDim>;
    using Result = WgmmaRows<kWaveM, kHeadDim>;
    // ds of the keys of a stage and of the queries of a consumer.
    static constexpr uint32 kScoresBytes = kKeys / 8 * StoredScores::kEightKeysBytes;
    static constexpr uint32 kStageBytes = kConsumers * kScoresBytes + Keys::kBytes;
    static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + 256;
    static_assert(Result::kBytes <= kStageBytes && kStages >= kConsumers, "room for results");
    static_assert(kSharedBytes <= 227 * 1024, "what a CTA may have");

    uint8* stages;
    uint64* full;
    uint64* empty;

    __device__ __forceinline__ explicit WideSumShape(uint8* memory) {
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

// Source of the stages of a tile of queries, from the first stage whose keys a query sees.
template <bool kTakesMore, int kHeadElements, int kStageCount>
struct SumStages<WideSumShape<kTakesMore, kHeadElements, kStageCount>> {
    using S = WideSumShape<kTakesMore, kHeadElements, kStageCount>;
    const ScoreGradients& scores;
    const TensorMap& k;
    SumPlace place;
    uint32 kv_head;
    uint32 first;

    // By one thread: copies the `number`-th of these stages to an empty stage of shared memory.
    __device__ __forceinline__ void copy(const S& shared, uint32 number, uint32 index) const {
        constexpr uint32 kOfTile = StoredScores::kTileRows / S::kKeys;
        const uint32 of_keys = first + number;
        uint64* full = shared.full + index;
        mbarrier_expect(full, S::kStageBytes);
        const uint8* source = scores.tile(place.head, place.tile, of_keys / kOfTile) +
                              of_keys % kOfTile * S::kScoresBytes;
        uint8* target = shared.stages + index * S::kStageBytes;
#pragma unroll
        for (int consumer = 0; consumer < kConsumers; ++consumer) {
            bulk_copy(target + consumer * S::kScoresBytes,
                      source + consumer * StoredScores::kBlockBytes, S::kScoresBytes, full);
        }
        copy_rows<typename S::Keys>(target + kConsumers * S::kScoresBytes, k, of_keys * S::kKeys,
                                    kv_head, place.batch, full);
    }
};

template <typename S>
__device__ __forceinline__ void sum_wide_scores(uint8* memory, const TensorMap& k,
                                                const TensorMap& dq, const Sizes& sizes,
                                                const WideHeads& heads,
                                                const SeenKeys& seen_keys) {
    const S shared(memory);
    const uint32 warp = begin_warp(shared);
    SumPlace place = sum_place<S>(sizes, KeyHeads{heads.first, heads.count, {nullptr}});
    uint32 first = 0;
    if constexpr (S::kExtended) {
        const int32 seen =
            seen_keys.first_seen(place.batch * sizes.keys, place.tile * kTileRows);
        first = max(0, seen) / S::kKeys;
        place.stages -= first;
    }
    const uint32 kv_head = place.query_head / (sizes.heads / sizes.kv_heads);
    sum_scores(shared, SumStages<S>{heads.scores, k, place, kv_head, first}, SumResults{dq}, sizes,
               place, warp);
}

}  // namespace sm90_attention
