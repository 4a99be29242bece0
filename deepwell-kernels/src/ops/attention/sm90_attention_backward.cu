// Gradients of attention (attention.cu) on wgmma: dq, dk and dv from dout, q, k, v, out and lse.
//
// dout, q, out, dq [batch * seq, heads * D], k, v, dk, dv [batch * seq, kv_heads * D] BF16, lse
// [batch, heads, seq] FP32; D as in sm90_attention.cu. With p = exp(scale q k^T - lse) and
// delta = sum(dout * out) by row:
//   dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale ds k,  dk = scale ds^T q.
//
// Three kernels: `rows` computes delta and lse in powers of two; `keys` computes dk and dv of a
// tile of 128 keys, over all queries of all heads that share the keys; `queries` computes dq of a
// tile of 128 queries, over all keys. The last two both compute p and ds: 7 GEMMs instead of 5. In
// return every gradient is summed by a single CTA in a fixed order, no gradient passes through
// memory in FP32 (with 5 GEMMs dq does, S^2 D 4 / 128 bytes per head, with CTAs taking turns), and
// ds never leaves registers.
//
// In `keys` and `queries` a CTA has a producer warpgroup and two consumer warpgroups. One thread of
// the producer takes tiles from a counter, the longest first, and issues the copies; the next tile
// is copied while the previous results are stored. A consumer has 64 rows of the tile, which are
// also the rows of its scores, so that p and ds are left operands in their register layout. The
// next wgmma are issued before the results of the previous wgmma are used: exponentials are
// overlapped with dout v^T, ds with p^T dout, and both with the other consumer's GEMMs.
//
// Budgets for D = 128, both consumers, with tensor cores at 4096 FLOP and shared memory at 128
// bytes per cycle; registers are per thread:
//               | of rows      | tensor | shared memory        | registers
//   keys        | 128 x 64     | 2048   | 1536 + 256 copied    | dk, dv 64 each, p, ds 32, 16 each
//   queries     | 128 x 128    | 3072   | 2048 + 512 copied    | dq 64, p, ds 64 and 32
// Exponentials, 16 per cycle, take 512 and 1024 cycles. With D = 64 the cycles of tensor cores and
// shared memory are half of these. Keys and values would then fit into registers, but ptxas 13.0
// assigns p and ds the registers of left operands that a loop of wgmma does not change.
//
// Kernels of `keys` and `queries` whose names end in `_extended` support windows and documents as
// in attention.cu. Sinks are included in lse; attention_backward.cu computes their gradients.
//
// architectures: sm_90a
#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_gradients.cuh"
#include "mma/sm90_attention_statistics.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/register_count.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "scheduler/attention_order.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// ---- queries: dq ----

template <bool kTakesMore, int kHeadElements, int kBlockKeys, int kSlotCount, int kStageCount>
struct QueryShape {
    static constexpr bool kExtended = kTakesMore;
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
    const uint32 tiles = sizes.tiles();
    const HeadTileIndex index =
        head_tile_at(number, tiles, sizes.batch * sizes.heads, sizes.section_heads);
    const uint32 batch = index.head / sizes.heads;
    // The last queries see the most keys, so they come first.
    const uint32 tile = sizes.causal != 0 ? tiles - 1 - index.tile : index.tile;
    const int32 first_query = tile * kTileRows;
    const int32 keys_seen =
        sizes.causal != 0 ? min(sizes.seq, first_query + kTileRows) : sizes.seq;
    const int32 first_seen =
        S::kExtended ? seen_keys.first_seen(batch * sizes.seq, first_query) : 0;
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
    const uint32 all = sizes.tiles() * sizes.batch * sizes.heads;
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
    const uint32 all = sizes.tiles() * sizes.batch * sizes.heads;
    const int32 seq = sizes.seq;
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
            const int32 all_see = sizes.causal != 0 ? min(seq, wave_query + 1) : seq;
            if (first_key + S::kBlock > all_see) {
                const int32 query = wave_query + lane_row;
                mask(p, {(sizes.causal != 0 ? min(seq, query + 1) : seq) - first_key,
                         (sizes.causal != 0 ? min(seq, query + 9) : seq) - first_key});
            }
            if constexpr (S::kExtended) {
                const uint32 first_token = place.batch * seq;
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
        slot.advance();
    }
    if (is_first_thread) {
        leaving.finish();
    }
}

// ---- kernels ----

template <typename S>
__device__ __forceinline__ void make_query_gradients(const Maps& maps,
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

// Tensors as at the top of this file, with `head_dim` elements per head; maps have boxes of 64
// elements of a head and of the rows of a tile or a stage (results: 64).
#define ROWS(name, lanes, rows)                                                                  \
    extern "C" __global__ void __launch_bounds__(kStatisticsThreads)                             \
        sm90_attention_backward_rows_##name(const bf16* dout, const bf16* out, const float* lse, \
                                            float* lse_log2, float* delta, uint32 seq,           \
                                            uint32 heads, uint32 head_dim) {                     \
        make_statistics<lanes, rows>(dout, out, lse, Statistics{lse_log2, delta}, seq, heads,    \
                                     head_dim);                                                  \
    }

#define KEYS_KERNEL(name, ends, is_extended, ...)                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_keys_##name##ends(                                               \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,          \
            float* lse_log2, float* delta, uint32* counters, uint32 seq, uint32 heads,           \
            uint32 kv_heads, uint32 batch, uint32 section_heads, uint32 causal, float scale,     \
            float scale_log2, uint32 window, const int32* documents) {                           \
        make_key_gradients<KeyShape<is_extended, false, __VA_ARGS__>>(                           \
            memory, Maps{dout, q, k, v, dk, dv}, Statistics{lse_log2, delta},                    \
            Sizes{counters, static_cast<int32>(seq), heads, kv_heads, batch, section_heads,      \
                  causal, scale, scale_log2},                                                    \
            KeyHeads{0, batch * kv_heads, {nullptr}},                                            \
            SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)});           \
    }

#define QUERIES_KERNEL(name, ends, is_extended, ...)                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_queries_##name##ends(                                            \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dq, float* lse_log2, float* delta,                 \
            uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch,           \
            uint32 section_heads, uint32 causal, float scale, float scale_log2, uint32 window,   \
            const int32* documents) {                                                            \
        make_query_gradients<QueryShape<is_extended, __VA_ARGS__>>(                              \
            Maps{dout, q, k, v, dq, dq}, Statistics{lse_log2, delta},                            \
            Sizes{counters, static_cast<int32>(seq), heads, kv_heads, batch, section_heads,      \
                  causal, scale, scale_log2},                                                    \
            SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)});           \
    }

#define KEYS(name, ...)                                                                          \
    KEYS_KERNEL(name, , false, __VA_ARGS__)                                                      \
    KEYS_KERNEL(name, _extended, true, __VA_ARGS__)

#define QUERIES(name, ...)                                                                       \
    QUERIES_KERNEL(name, , false, __VA_ARGS__)                                                   \
    QUERIES_KERNEL(name, _extended, true, __VA_ARGS__)

// Lanes per row; rows of a CTA, few, so that the loads of a CTA overlap the sums of others.
ROWS(d64, 8, 64)
ROWS(d128, 16, 32)
// Elements of a head; queries or keys of a stage; number of tiles and of stages.
KEYS(d64_64, 64, 64, 2, 4)
KEYS(d96_64, 96, 64, 2, 3)
KEYS(d128_64, 128, 64, 2, 3)
QUERIES(d64_64, 64, 64, 2, 4)
QUERIES(d64_128, 64, 128, 2, 3)
QUERIES(d96_96, 96, 96, 2, 2)
QUERIES(d128_96, 128, 96, 2, 2)
QUERIES(d128_128, 128, 128, 1, 2)
