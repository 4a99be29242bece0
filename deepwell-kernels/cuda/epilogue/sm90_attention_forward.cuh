// Attention forward on wgmma: tiles of queries, and attention of a tile to the keys that it sees.
// sm90_attention.cu and sm90_attention_part.cu instantiate this; the former describes it.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_part_rows.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/register_count.cuh"
#include "ptx/release.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "scheduler/attention_order.cuh"

namespace sm90_attention {

// What a kernel supports beyond plain attention.
enum class Takes {
    kPlain,
    kExtended,  // windows, sinks and documents
    kPart,      // other numbers of keys than of queries; results in FP32, without a tensor map
};

template <Takes kTakes, int kHeadElements, int kConsumerCount, int kBlockKeys,
          int kTilesOfQueries>
struct Shape {
    static constexpr bool kExtended = kTakes == Takes::kExtended;
    static constexpr bool kPart = kTakes == Takes::kPart;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kConsumers = kConsumerCount;
    static constexpr int kBlockM = kConsumers * kWaveM;
    static constexpr int kBlockN = kBlockKeys;
    static constexpr int kSlots = kTilesOfQueries;  // tiles of queries in shared memory
    static constexpr int kStages = 2;               // blocks of keys, and as many of values
    using Queries = WgmmaRows<kBlockM, kHeadDim>;
    using Keys = WgmmaRows<kBlockN, kHeadDim>;

    static constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
    // Registers per thread. The CTA's total is at most that at launch.
    static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
    static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;

    static constexpr int kSharedBytes =
        1024 + kSlots * Queries::kBytes + 2 * kStages * Keys::kBytes + 256;
    static_assert(kSharedBytes <= 227 * 1024, "what a CTA may have");
};

// q, k, v and out as [batch, rows, heads, D], in boxes of 64 elements of a head: kBlockM rows of q,
// kBlockN rows of k and v, 64 rows of out. out is not used for parts.
struct Maps {
    const TensorMap& q;
    const TensorMap& k;
    const TensorMap& v;
    const TensorMap& out;
};

struct Arguments {
    float* lse;
    uint32* counters;      // tiles taken, CTAs done; zero before and after
    int32 queries;         // of a sequence
    int32 keys;            // of a sequence; other than the queries only for parts
    int32 lse_rows;        // of a head
    uint32 heads;
    uint32 kv_heads;
    uint32 batch_heads;    // batch * heads
    uint32 section_heads;  // see scheduler/attention_order.cuh
    uint32 causal;
    float scale_log2;      // scale * log2(e), positive
    // For extended kernels.
    int32 window;            // at most the keys of a sequence, which also means no window
    const float* sinks;      // [heads], or null
    const int32* documents;  // [batch * queries, 2], or null
    // For parts.
    PartRows out;

    __device__ __forceinline__ SeenKeys seen_keys() const {
        return SeenKeys{documents, queries, window};
    }
};

// Shared memory, from a 1024-byte boundary on.
template <typename S>
struct Shared {
    uint8* queries;  // [kSlots] tiles, later the staged results
    uint8* keys;     // [kStages]
    uint8* values;   // [kStages]
    uint64* queries_full;
    uint64* queries_empty;
    uint64* keys_full;
    uint64* keys_empty;
    uint64* values_full;
    uint64* values_empty;
    volatile uint32* tiles;  // [kSlots] tile numbers

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        queries = memory + (-address & 1023);
        keys = queries + S::kSlots * S::Queries::kBytes;
        values = keys + S::kStages * S::Keys::kBytes;
        queries_full = reinterpret_cast<uint64*>(values + S::kStages * S::Keys::kBytes);
        queries_empty = queries_full + S::kSlots;
        keys_full = queries_empty + S::kSlots;
        keys_empty = keys_full + S::kStages;
        values_full = keys_empty + S::kStages;
        values_empty = values_full + S::kStages;
        tiles = reinterpret_cast<uint32*>(values_empty + S::kStages);
    }

    // Called by one thread.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::kSlots; ++i) {
            mbarrier_set(queries_full + i);
            mbarrier_set(queries_empty + i, S::kConsumers);
        }
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(keys_full + i);
            mbarrier_set(keys_empty + i, S::kConsumers * kWarpgroup / 32);
            mbarrier_set(values_full + i);
            mbarrier_set(values_empty + i, S::kConsumers * kWarpgroup / 32);
        }
        mbarrier_publish();
    }
};

// A tile of queries.
struct Place {
    uint32 batch;
    uint32 head;
    int32 first_query;
    int32 first_block;  // of the visible keys
    int32 blocks;       // end of the blocks (exclusive)
};

template <typename S>
struct Tiles {
    uint32 of_head;
    uint32 all;

    __device__ __forceinline__ explicit Tiles(const Arguments& arguments)
        : of_head((arguments.queries + S::kBlockM - 1) / S::kBlockM),
          all(of_head * arguments.batch_heads) {}

    __device__ __forceinline__ Place place(uint32 number, const Arguments& arguments) const {
        const HeadTileIndex index =
            head_tile_at(number, of_head, arguments.batch_heads, arguments.section_heads);
        const uint32 batch = index.head / arguments.heads;
        // The last queries see the most keys, so they come first.
        const uint32 tile = arguments.causal != 0 ? of_head - 1 - index.tile : index.tile;
        const int32 first_query = tile * S::kBlockM;
        const int32 keys = arguments.keys;
        const int32 keys_seen =
            arguments.causal != 0 ? min(keys, first_query + S::kBlockM) : keys;
        const int32 first_seen =
            S::kExtended ? arguments.seen_keys().first_seen(batch * arguments.queries, first_query)
                         : 0;
        return Place{batch, index.head - batch * arguments.heads, first_query,
                     max(0, first_seen) / S::kBlockN,
                     (keys_seen + S::kBlockN - 1) / S::kBlockN};
    }
};

// Copies all columns of kRows rows of a head, from row `row` on.
template <typename Rows>
__device__ __forceinline__ void copy_rows(uint8* target, const TensorMap& map, int32 row,
                                          uint32 head, uint32 batch, uint64* full) {
    mbarrier_expect(full, Rows::kBytes);
#pragma unroll
    for (uint32 chunk = 0; chunk < Rows::kChunks; ++chunk) {
        const TensorPlace place{
            {chunk * kChunkColumns, head, static_cast<uint32>(row), batch}};
        tensor_copy_4d(target + chunk * Rows::kChunkBytes, map, place, full);
    }
}

// The producer: one thread.
template <typename S>
__device__ __forceinline__ void produce(const Shared<S>& shared, const Maps& maps,
                                        const Arguments& arguments) {
    using Keys = typename S::Keys;
    const Tiles<S> tiles(arguments);
    const uint32 group = arguments.heads / arguments.kv_heads;
    Stage<S::kSlots> slot;
    Stage<S::kStages> key_stage;
    Stage<S::kStages> value_stage;
    uint32 number = blockIdx.x;
    for (;;) {
        mbarrier_wait(shared.queries_empty + slot.index, slot.phase ^ 1);
        shared.tiles[slot.index] = number;
        uint64* full = shared.queries_full + slot.index;
        if (number >= tiles.all) {
            mbarrier_arrive(full);
            break;
        }
        const Place place = tiles.place(number, arguments);
        // Prefetches the next tile's number.
        number = gridDim.x + atomicAdd(arguments.counters, 1u);
        copy_rows<typename S::Queries>(shared.queries + slot.index * S::Queries::kBytes, maps.q,
                                       place.first_query, place.head, place.batch, full);
        slot.advance();
        const uint32 kv_head = place.head / group;
        for (int32 block = place.blocks; block >= place.first_block; --block) {
            // Each block of values is copied after the keys of the next block.
            if (block > place.first_block) {
                mbarrier_wait(shared.keys_empty + key_stage.index, key_stage.phase ^ 1);
                copy_rows<Keys>(shared.keys + key_stage.index * Keys::kBytes, maps.k,
                                (block - 1) * S::kBlockN, kv_head, place.batch,
                                shared.keys_full + key_stage.index);
                key_stage.advance();
            }
            if (block < place.blocks) {
                mbarrier_wait(shared.values_empty + value_stage.index, value_stage.phase ^ 1);
                copy_rows<Keys>(shared.values + value_stage.index * Keys::kBytes, maps.v,
                                block * S::kBlockN, kv_head, place.batch,
                                shared.values_full + value_stage.index);
                value_stage.advance();
            }
        }
    }
    // The last CTA resets the counters.
    if (add_acquire_release(arguments.counters + 1, 1) == gridDim.x - 1) {
        arguments.counters[0] = 0;
        arguments.counters[1] = 0;
    }
}

// A consumer.
template <typename S>
__device__ __forceinline__ void consume(const Shared<S>& shared, const Maps& maps,
                                        const Arguments& arguments, uint32 consumer) {
    using Queries = typename S::Queries;
    using Keys = typename S::Keys;
    const Tiles<S> tiles(arguments);
    const float scale_log2 = arguments.scale_log2;
    const int32 keys = arguments.keys;
    const int32 lane_row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const bool is_first_thread = threadIdx.x % kWarpgroup == 0;
    const uint32 queries_at = static_cast<uint32>(__cvta_generic_to_shared(shared.queries)) +
                              consumer * kWaveM * kChunkRowBytes;
    const uint32 keys_at = static_cast<uint32>(__cvta_generic_to_shared(shared.keys));
    const uint32 values_at = static_cast<uint32>(__cvta_generic_to_shared(shared.values));
    const Turn<S::kConsumers> turn(consumer);
    Stage<S::kSlots> slot;
    Stage<S::kStages> key_stage;
    Stage<S::kStages> value_stage;
    // The barrier of the slot whose results are still being stored.
    uint64* stored = nullptr;

    for (;;) {
        mbarrier_wait(shared.queries_full + slot.index, slot.phase);
        const uint32 number = shared.tiles[slot.index];
        if (number >= tiles.all) {
            break;
        }
        const Place place = tiles.place(number, arguments);
        const int32 wave_query = place.first_query + consumer * kWaveM;
        const WgmmaMatrix queries = Queries::rows(queries_at + slot.index * Queries::kBytes);

        float scores[S::kBlockN / 2];
        float sums[S::kHeadDim / 2];
        uint32 weights[S::kBlockN / 16][4];
        float factors[2];
        Softmax softmax;
#pragma unroll
        for (int i = 0; i < S::kHeadDim / 2; ++i) {
            sums[i] = 0.0f;
        }
        // Starts the scores for one block of keys.
        const auto start_scores = [&]() {
            start_products<Queries, Keys>(scores, queries,
                                          Keys::rows(keys_at + key_stage.index * Keys::kBytes));
        };
        const auto start_sums = [&]() {
            start_weighted_sums<Keys>(
                sums, weights, Keys::columns(values_at + value_stage.index * Keys::kBytes));
        };
        const auto weigh = [&](int32 block) {
            const int32 first_key = block * S::kBlockN;
            const int32 all_see = arguments.causal != 0 ? min(keys, wave_query + 1) : keys;
            if (first_key + S::kBlockN > all_see) {
                const int32 query = wave_query + lane_row;
                const int32 seen[2] = {
                    (arguments.causal != 0 ? min(keys, query + 1) : keys) - first_key,
                    (arguments.causal != 0 ? min(keys, query + 9) : keys) - first_key};
                mask(scores, seen);
            }
            if constexpr (S::kExtended) {
                const SeenKeys seen_keys = arguments.seen_keys();
                const uint32 first_token = place.batch * keys;
                if (first_key < seen_keys.first_seen(first_token, wave_query + kWaveM - 1)) {
                    const int32 query = wave_query + lane_row;
                    mask_first(scores,
                               {seen_keys.first_seen(first_token, query) - first_key,
                                seen_keys.first_seen(first_token, query + 8) - first_key});
                }
            }
            return softmax.weigh(scores, factors, scale_log2);
        };

        int32 block = place.blocks - 1;
        mbarrier_wait(shared.keys_full + key_stage.index, key_stage.phase);
        wgmma_fence();
        start_scores();
        wgmma_wait_for<0>(scores);
        release(shared.keys_empty + key_stage.index);
        key_stage.advance();
        if (stored != nullptr && is_first_thread) {
            tensor_store_wait_read();
            mbarrier_arrive(stored);
        }
        weigh(block);
        to_left(weights, scores);

#pragma unroll 1
        for (--block; block >= place.first_block; --block) {
            mbarrier_wait(shared.keys_full + key_stage.index, key_stage.phase);
            turn.await();
            wgmma_fence();
            start_scores();
            mbarrier_wait(shared.values_full + value_stage.index, value_stage.phase);
            start_sums();
            turn.pass();
            wgmma_wait_for<1>(scores);
            release(shared.keys_empty + key_stage.index);
            key_stage.advance();
            const bool moved = weigh(block);
            wgmma_wait_for<0>(sums);
            release(shared.values_empty + value_stage.index);
            value_stage.advance();
            to_left(weights, scores);
            if (moved) {
                scale_rows(sums, factors);
            }
        }

        mbarrier_wait(shared.values_full + value_stage.index, value_stage.phase);
        wgmma_fence();
        start_sums();
        wgmma_wait_for<0>(sums);
        release(shared.values_empty + value_stage.index);
        value_stage.advance();

#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = softmax.whole_sum(half);
            float factor = 1.0f;
            if (S::kExtended && arguments.sinks != nullptr) {
                const float sink = arguments.sinks[place.head] * kLog2E;
                const float raised = fmaxf(softmax.reference[half], sink);
                factor = ex2(softmax.reference[half] - raised);
                sum = fmaf(sum, factor, ex2(sink - raised));
                softmax.reference[half] = raised;
            }
            factors[half] = factor / sum;
            const int32 query = wave_query + lane_row + 8 * half;
            if (threadIdx.x % 4 == 0 && query < arguments.queries) {
                const uint32 batch_head = place.batch * arguments.heads + place.head;
                arguments.lse[static_cast<uint64>(batch_head) * arguments.lse_rows + query] =
                    (softmax.reference[half] + lg2(sum)) * kLn2;
            }
        }
        scale_rows(sums, factors);
        if constexpr (S::kPart) {
            // No warp of this consumer multiplies by the queries any more.
            synchronize_warpgroup<S::kConsumers>(consumer);
            if (is_first_thread) {
                mbarrier_arrive(shared.queries_empty + slot.index);
            }
            arguments.out.store(sums, 1.0f, wave_query, place.head, place.batch);
        } else {
            uint8* staged = shared.queries + slot.index * Queries::kBytes +
                            consumer * kWaveM * kChunkRowBytes;
#pragma unroll
            for (int unit = 0; unit < S::kHeadDim / 8; ++unit) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32 at = Queries::offset(lane_row + 8 * half, unit);
                    *reinterpret_cast<uint32*>(staged + at + threadIdx.x % 4 * 4) =
                        to_bf16_pair(sums[4 * unit + 2 * half], sums[4 * unit + 2 * half + 1]);
                }
            }
            fence_before_copies();
            synchronize_warpgroup<S::kConsumers>(consumer);
            if (is_first_thread) {
#pragma unroll
                for (uint32 chunk = 0; chunk < Queries::kChunks; ++chunk) {
                    const TensorPlace target{{chunk * kChunkColumns, place.head,
                                              static_cast<uint32>(wave_query), place.batch}};
                    tensor_store_4d(maps.out, target, staged + chunk * Queries::kChunkBytes);
                }
                tensor_store_commit();
                if constexpr (S::kSlots == 1) {
                    tensor_store_wait_read();
                    mbarrier_arrive(shared.queries_empty);
                }
            }
            if constexpr (S::kSlots > 1) {
                stored = shared.queries_empty + slot.index;
            }
        }
        slot.advance();
    }
    if (is_first_thread) {
        tensor_store_wait_read();
    }
    turn.end();
}

template <typename S>
__device__ __forceinline__ void attend(uint8* memory, const Maps& maps,
                                       const Arguments& arguments) {
    const Shared<S> shared(memory);
    // Uniform over the warp; the shuffle makes this known to the compiler.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0 && elect_one()) {
        shared.init_barriers();
    }
    __syncthreads();
    if (warp < kWarpgroup / 32) {
        keep_registers<S::kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            produce(shared, maps, arguments);
        }
    } else {
        take_registers<S::kConsumerRegisters>();
        consume(shared, maps, arguments, warp / (kWarpgroup / 32) - 1);
    }
}

}  // namespace sm90_attention
