// Gradients of attention (attention.cu) on wgmma with five GEMMs. sm90_attention_backward.cu has
// seven, because it computes scores and their gradients twice; arguments and notation are the same.
//
// Three kernels: `rows` computes delta and lse in powers of two. `keys` computes dk and dv of a
// tile of 128 keys, over all queries of all heads that share the keys, and adds the tile's part of
// dq to FP32 sums. `round` rounds these sums to BF16. scheduler/sm90_attention_turns.cuh defines
// the order in which tiles add, so results do not depend on timing.
//
// In `keys` a CTA has a producer warpgroup and two consumers, as in sm90_attention_backward.cu. One
// thread of the producer issues the copies, another thread waits for turns. A consumer has 64 keys
// of the tile as rows of scores: p and ds are left operands in their register layout. For dq both
// consumers write ds to shared memory, and each computes a part of 64 x 64: some columns of 64
// queries if D = 128, some of 128 queries if D = 64. This happens one block late, so that no
// consumer waits for the other's ds, and the addition is overlapped with the GEMM of dk.
//
// Budget of 128 keys x 64 queries with D = 128, in cycles: tensor cores (4096 FLOP) 5 x 512 = 2560;
// shared memory (128 bytes) 2 x 512 for scores and dp, which read both operands from shared memory,
// 2 x 256 for dv and dk, 512 for dq, 128 for ds, 256 for copies, 200 for statistics: 2632, plus 256
// for the additions of dq on the same path. sm90_attention_backward.cu: 3584 and 3200. Sums of dq
// move 32 KiB per block, S^2 D / 32 bytes per head (half of this if causal), in the L2 cache: at 2
// us per block 2.1 TB/s from 132 SMs. `round` reads 4 and writes 2 bytes per element, 1 to 2 % of
// the time. Registers per thread: dk, dv 64 each, p, ds, dq 32 each, p as BF16 16.
//
// architectures: sm_90a
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_gradients.cuh"
#include "mma/sm90_attention_statistics.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/register_count.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "scheduler/sm90_attention_turns.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// ---- keys: dk, dv, and parts of dq ----

template <int kHeadElements, int kBlockQueries, int kSlotCount, int kStageCount>
struct Shape {
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kBlock = kBlockQueries;  // queries of a stage
    static_assert(kHeadDim * kBlock == kSumsOfBlock, "a part of dq for each consumer");
    using Own = WgmmaRows<kTileRows, kHeadDim>;
    using Streamed = WgmmaRows<kBlock, kHeadDim>;
    using Shared = OrderedLayout<Layout<Own, Streamed, kSlotCount, kStageCount, kBlock>, kBlock>;
    using Tile = OrderedTile<kBlock>;
};

template <typename S>
__device__ __forceinline__ void produce(const typename S::Shared& shared, const Maps& maps,
                                        const Statistics& statistics, const Sizes& sizes,
                                        const Order& order) {
    using Shared = typename S::Shared;
    using Own = typename S::Own;
    using Streamed = typename S::Streamed;
    const uint32 padded_seq = sizes.padded_seq();
    Stage<Shared::kSlots> slot;
    Stage<Shared::kStages> stage;
    uint32 number = blockIdx.x;
    for (;;) {
        mbarrier_wait(shared.own_empty + slot.index, slot.phase ^ 1);
        shared.tiles[slot.index] = number;
        uint64* own_full = shared.own_full + slot.index;
        if (number >= order.all) {
            mbarrier_arrive(own_full);
            break;
        }
        const typename S::Tile tile(number, sizes, order);
        copy_tile(shared, slot.index, maps.k, maps.v, tile.first_key(), tile.kv_head, tile.batch);
        slot.advance();
        for (uint32 i = 0; i < order.group; ++i) {
            const uint32 head = tile.kv_head * order.group + i;
            const uint32 rows = (tile.batch * sizes.heads + head) * padded_seq;
            int32 query = tile.begin() * S::kBlock;
            const int32 stride = tile.stride() * S::kBlock;
            for (int32 left = tile.count(); left > 0; --left, query += stride) {
                mbarrier_wait(shared.empty[0] + stage.index, stage.phase ^ 1);
                uint64* full = shared.full[0] + stage.index;
                shared.first_queries[stage.index] = query;
                mbarrier_expect(full, Streamed::kBytes + S::kBlock * 4);
                copy_rows<Streamed>(shared.streamed[0] + stage.index * Streamed::kBytes, maps.q,
                                    query, head, tile.batch, full);
                bulk_copy(shared.lse_log2 + stage.index * S::kBlock,
                          statistics.lse_log2 + rows + query, S::kBlock * 4, full);
                full = shared.full[1] + stage.index;
                mbarrier_expect(full, Streamed::kBytes + S::kBlock * 4);
                copy_rows<Streamed>(shared.streamed[1] + stage.index * Streamed::kBytes, maps.dout,
                                    query, head, tile.batch, full);
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

template <typename S>
__device__ __forceinline__ void sum_over_queries(const typename S::Shared& shared,
                                                 const Maps& maps, const QuerySums& dq_sums,
                                                 const Sizes& sizes, const Order& order,
                                                 uint32 consumer) {
    using Shared = typename S::Shared;
    using Scores = typename Shared::Scores;
    using Own = typename S::Own;
    using Streamed = typename S::Streamed;
    constexpr int kSteps = S::kBlock / 16;
    constexpr uint32 kBothConsumers = 1;  // barrier number
    const float scale_log2 = sizes.scale_log2;
    const uint32 wave_offset = consumer * kWaveM * kChunkRowBytes;
    const int32 lane_row = threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
    const bool is_first_thread = threadIdx.x % kWarpgroup == 0;
    // This consumer's part of dq: some columns of the keys, or some of the queries.
    const uint32 keys_part = Own::kChunks == 2 ? consumer * Own::kChunkBytes : 0;
    const uint32 scores_part = Scores::kChunks == 2 ? consumer * Scores::kChunkBytes : 0;
    Stage<Shared::kSlots> slot;
    Stage<Shared::kStages> streamed;
    Leaving leaving;
    // Number of blocks whose ds this consumer has written to shared memory. The first block is
    // zeros, so that every block has a predecessor: with a branch around wgmma, ptxas inserts a
    // wait after each wgmma.
    uint32 blocks = 1;
    put_zeros<Scores>(shared.scores, consumer);
    fence_before_copies();
    release(shared.scores_full);

    for (;;) {
        mbarrier_wait(shared.own_full + slot.index, slot.phase);
        const uint32 number = shared.tiles[slot.index];
        if (number >= order.all) {
            break;
        }
        const typename S::Tile tile(number, sizes, order);
        const int32 wave_key = tile.first_key() + consumer * kWaveM;
        const uint32 keys_at = Shared::address(shared.own[0], slot.index, Own::kBytes);
        const uint32 values_at = Shared::address(shared.own[1], slot.index, Own::kBytes);
        const WgmmaMatrix keys = Own::rows(keys_at + wave_offset);
        const WgmmaMatrix values = Own::rows(values_at + wave_offset);

        float dk[S::kHeadDim / 2];
        float dv[S::kHeadDim / 2];
        set_zero(dk);
        set_zero(dv);
        // Starts the GEMM of dq for a block.
        const auto start_dq = [&](float (&dq)[kSumsOfThread], uint32 block) {
            const uint32 index = block % Shared::kScoreStages;
            mbarrier_wait(shared.scores_full + index, block / Shared::kScoreStages & 1);
            wgmma_fence();
            start_query_sums<Scores, Own>(
                dq,
                Scores::columns(Shared::address(shared.scores, index, Scores::kBytes) +
                                scores_part),
                Own::columns(keys_at + keys_part));
        };
        const uint32 first = blocks;
        const uint32 end = first + order.group * tile.count();
#pragma unroll 1
        for (; blocks != end; ++blocks) {
            const uint32 stage = streamed.index;
            const uint32 stage_phase = streamed.phase;
            const uint32 queries_at = Shared::address(shared.streamed[0], stage, Streamed::kBytes);
            const uint32 dout_at = Shared::address(shared.streamed[1], stage, Streamed::kBytes);
            float p[S::kBlock / 2];
            float ds[S::kBlock / 2];
            uint32 p_words[kSteps][4];
            uint32 ds_words[kSteps][4];

            mbarrier_wait(shared.full[0] + stage, stage_phase);
            wgmma_fence();
            start_products<Own, Streamed>(p, keys, Streamed::rows(queries_at));
            // Waits for all sums of the previous block.
            wgmma_wait_for<1>(dk);
            if (blocks != first) {
                release(shared.empty[0] + (stage + Shared::kStages - 1) % Shared::kStages);
            }
            mbarrier_wait(shared.full[1] + stage, stage_phase);
            wgmma_fence();
            start_products<Own, Streamed>(ds, values, Streamed::rows(dout_at));
            if (is_first_thread) {
                leaving.finish();
            }
            wgmma_wait_for<1>(p);
            const int32 first_query = shared.first_queries[stage];
            const bool is_causal = sizes.causal != 0;
            const bool is_cut = wave_key + kWaveM > sizes.keys;
            if (is_cut || (is_causal && first_query < wave_key + kWaveM - 1)) {
                const int32 key = wave_key + lane_row;
                const int32 hidden = is_causal ? key - first_query : -8;
                // Keys beyond the sequence would be weighted by lse alone.
                mask_first(p, {key < sizes.keys ? hidden : S::kBlock,
                               key + 8 < sizes.keys ? hidden + 8 : S::kBlock});
            }
            float2 lse[S::kBlock / 8];
            read_columns(lse, shared.lse_log2 + stage * S::kBlock);
            weigh_columns(p, lse, scale_log2);
            float2 delta[S::kBlock / 8];
            read_columns(delta, shared.delta + stage * S::kBlock);
            wgmma_wait_for<0>(ds);
            differentiate_columns(ds, p, delta);
            to_left(p_words, p);
            wgmma_fence();
            start_weighted_sums<Streamed>(dv, p_words, Streamed::columns(dout_at));
            to_left(ds_words, ds);
            const uint32 index = blocks % Shared::kScoreStages;
            mbarrier_wait(shared.scores_empty + index, (blocks / Shared::kScoreStages & 1) ^ 1);
            stage_scores<Scores>(shared.scores + index * Scores::kBytes, ds_words, consumer);
            fence_before_copies();
            release(shared.scores_full + index);
            // dq of the previous block. After another tile's block it is computed a second time and
            // not added.
            float dq[kSumsOfThread];
            start_dq(dq, blocks - 1);
            wgmma_fence();
            start_weighted_sums<Streamed>(dk, ds_words, Streamed::columns(queries_at));
            wgmma_wait_for<1>(dq);
            release(shared.scores_empty + (blocks - 1) % Shared::kScoreStages);
            if (blocks != first) {
                add_in_turn(shared, dq, dq_sums.sums, blocks & 1);
            }
            streamed.advance();
        }
        float dq[kSumsOfThread];
        start_dq(dq, blocks - 1);
        wgmma_wait_for<1>(dk);
        wgmma_wait_for<1>(dv);
        release(shared.empty[0] + (streamed.index + Shared::kStages - 1) % Shared::kStages);
        if (is_first_thread) {
            leaving.finish();
        }
        // No other consumer reads these rows of values, but both consumers read all keys.
        uint8* staged_dk = shared.own[0] + slot.index * Own::kBytes + wave_offset;
        uint8* staged_dv = shared.own[1] + slot.index * Own::kBytes + wave_offset;
        synchronize_warpgroup<kConsumers>(consumer);
        stage_rows<Own>(staged_dv, dv, 1.0f);
        wgmma_wait_for<0>(dq);
        barrier_sync(kBothConsumers, kConsumers * kWarpgroup);
        stage_rows<Own>(staged_dk, dk, sizes.scale);
        fence_before_copies();
        synchronize_warpgroup<kConsumers>(consumer);
        if (is_first_thread) {
            const typename S::Tile again(shared.tiles[slot.index], sizes, order);
            store_rows<Own>(maps.first, staged_dk, wave_key, again.kv_head, again.batch);
            store_rows<Own>(maps.second, staged_dv, wave_key, again.kv_head, again.batch);
            leaving.set(shared.own_empty + slot.index);
        }
        add_in_turn(shared, dq, dq_sums.sums, blocks & 1);
        if constexpr (Shared::kSlots == 1) {
            if (is_first_thread) {
                leaving.finish();
            }
        }
        slot.advance();
    }
    if (is_first_thread) {
        leaving.finish();
    }
}

template <typename S>
__device__ __forceinline__ void make_key_gradients(const Maps& maps, const Statistics& statistics,
                                                   const QuerySums& dq, const Sizes& sizes,
                                                   const Order& order) {
    const typename S::Shared shared(memory);
    const uint32 warp = begin_warp(shared);
    if (warp < kWarpgroup / 32) {
        keep_registers<kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            produce<S>(shared, maps, statistics, sizes, order);
        } else if (warp == 1 && elect_one()) {
            take_turns<typename S::Shared, S::kBlock>(shared, dq, sizes, order);
        }
    } else {
        take_registers<kConsumerRegisters>();
        sum_over_queries<S>(shared, maps, dq, sizes, order,
                            warp / (kWarpgroup / 32) - 1);
    }
}

// ---- rows: statistics, and counts of tiles that have added (zero) ----

// Called by the CTA that computes the statistics of 128 rows.
template <int kBlock>
__device__ __forceinline__ void set_counts(uint32* counts, uint32 seq) {
    constexpr uint32 kBlocks = kStatisticsRows / kBlock;
    const uint32 tiles = (seq + kStatisticsRows - 1) / kStatisticsRows;
    const uint32 blocks = (seq + kBlock - 1) / kBlock;
    const uint32 batch_head = blockIdx.x / tiles;
    const uint32 block = (blockIdx.x - batch_head * tiles) * kBlocks + threadIdx.x;
    if (threadIdx.x < kBlocks && block < blocks) {
        counts[static_cast<uint64>(batch_head) * blocks + block] = 0;
    }
}

// ---- round: dq ----

constexpr int kRoundThreads = 256;

// dq = scale sums, for a block of a head. Sums are in the consumers' register layout: 64 queries by
// 64 columns per consumer, `kBlock` queries in all.
template <int kBlock>
__device__ __forceinline__ void round_sums(const float* sums, bf16* dq, uint32 seq, uint32 heads,
                                           uint32 head_dim, float scale) {
    constexpr uint32 kUnits = kSumsOfBlock / kBlock / 8;  // of eight columns, per row
    const uint32 blocks = (seq + kBlock - 1) / kBlock;
    const uint32 batch_head = blockIdx.x / blocks;
    const uint32 block = blockIdx.x - batch_head * blocks;
    const uint32 batch = batch_head / heads;
    const uint32 head = batch_head - batch * heads;
    const float* of_block = sums + static_cast<uint64>(blockIdx.x) * kSumsOfBlock;
#pragma unroll
    for (uint32 at = threadIdx.x; at < kSumsOfBlock / 8; at += kRoundThreads) {
        const uint32 row = at / kUnits;
        const uint32 unit = at % kUnits;
        const uint32 query = block * kBlock + row;
        if (query >= seq || unit * 8 >= head_dim) {
            continue;
        }
        // Consumer, group of four registers, warp, lane and half.
        const uint32 consumer = unit / 8 + row / kWaveM;
        const uint32 place = consumer * (kSumsOfThread / 4) + unit % 8;
        const uint32 thread = row % kWaveM / 16 * 32 + row % 8 * 4;
        const float* from = of_block + (place * kWarpgroup + thread) * 4 + row % 16 / 8 * 2;
        float values[8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 pair = *reinterpret_cast<const float2*>(from + 4 * i);
            values[2 * i] = pair.x * scale;
            values[2 * i + 1] = pair.y * scale;
        }
        const uint64 token = static_cast<uint64>(batch) * seq + query;
        reinterpret_cast<uint4*>(dq)[(token * heads + head) * (head_dim / 8) + unit] =
            pack_bf16x8(values);
    }
}

// ---- kernels ----

// Arguments as in sm90_attention_backward.cu; `sums` and `counts` are `QuerySums`, for blocks of
// this many queries.
#define ROWS(name, lanes, block)                                                                 \
    extern "C" __global__ void __launch_bounds__(kStatisticsThreads)                             \
        sm90_attention_backward_ordered_rows_##name(                                             \
            const bf16* dout, const bf16* out, const float* lse, float* lse_log2, float* delta,  \
            uint32* counts, uint32 seq, uint32 heads, uint32 head_dim) {                         \
        make_statistics<lanes, kStatisticsRows>(dout, out, lse, Statistics{lse_log2, delta},     \
                                                seq, seq, heads, head_dim);                      \
        set_counts<block>(counts, seq);                                                          \
    }

#define KEYS(name, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_ordered_keys_##name(                                             \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,          \
            float* lse_log2, float* delta, uint32* counts, float* sums, uint32* counters,        \
            uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch, uint32 section_heads,       \
            uint32 all, uint32 group, uint32 longest_first_from, uint32 causal, float scale,     \
            float scale_log2) {                                                                  \
        make_key_gradients<Shape<__VA_ARGS__>>(                                                  \
            Maps{dout, q, k, v, dk, dv}, Statistics{lse_log2, delta}, QuerySums{sums, counts},   \
            Sizes{counters, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads,   \
                  batch, section_heads, causal, scale, scale_log2},                              \
            Order{all, group, longest_first_from});                                              \
    }

#define ROUND(name, block)                                                                       \
    extern "C" __global__ void __launch_bounds__(kRoundThreads)                                  \
        sm90_attention_backward_ordered_round_##name(const float* sums, bf16* dq, uint32 seq,    \
                                                     uint32 heads, uint32 head_dim,              \
                                                     float scale) {                              \
        round_sums<block>(sums, dq, seq, heads, head_dim, scale);                                \
    }

// Elements of a head; queries of a stage; number of tiles and of stages.
ROWS(d64, 8, 128)
KEYS(d64, 64, 128, 2, 2)
ROUND(d64, 128)
