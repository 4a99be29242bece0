// Gradients of attention (attention.cu) on tcgen05: dq, dk and dv from dout, q, k, v, out and lse.
//
// dout, q, out, dq [batch * seq, heads * D], k, v, dk, dv [batch * seq, kv_heads * D] BF16, lse
// [batch, heads, seq] FP32; D as in sm100_attention.cu. With p = exp(scale q k^T - lse) and
// delta = sum(dout * out) by row:
//   dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale ds k,  dk = scale ds^T q.
//
// Three kernels with five GEMMs: `rows` computes delta and lse in powers of two; `keys` computes dk
// and dv of a tile of 128 keys, over all queries of all heads that share the keys, and stores ds in
// BF16; `queries` computes dq of 256 queries from the stored ds. Every sum has one CTA and a fixed
// order, so results do not depend on timing. The host launches `keys` and `queries` by turns for
// some heads, so that memory for ds is bounded.
//
// In `keys` a key is a lane of tensor memory, so that p^T and ds^T are left operands there. Warps
// have roles:
//   math      eight warps: turn scores into p, and p and dout v^T into ds;
//   MMA       one thread issues, for each tile of queries, dv, the next scores, dk, and the next
//             dout v^T, so that the tensor cores work while either p or ds is computed. With
//             D <= 64 the next scores come first;
//   producer  one thread issues the copies.
// Budget of 128 keys x 128 queries with D = 128, in cycles: tensor cores 4 x 512; shared memory
// 2 x 512 for products that read both operands from there, 2 x 256 for sums, 512 for copies, 256
// for statistics; MUFU 768, and a quarter of the exponentials on FMA units. `queries` has another
// 512 of tensor cores, and reads 32 KiB of ds.
//
// With D > 64 tensor memory has no room for scores beside p, and for dout v^T beside ds: the next
// scores overwrite the p that the previously issued MMA reads. MMAs of one thread run in the order
// of their issue on current hardware; the PTX ISA orders only MMAs of one accumulator
// (docs/emulator.md, `--mma-order`).
//
// Kernels whose names end in `_extended` support windows and documents as in attention.cu. Sinks
// are included in lse; attention_backward.cu computes their gradients.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/sm100_attention_gradients.cuh"
#include "epilogue/sm100_attention_query_gradients.cuh"
#include "layout/score_gradients.cuh"
#include "mma/sm100_attention_backward_tile.cuh"
#include "mma/sm100_attention_gradients.cuh"
#include "mma/sm100_tile.cuh"
#include "mma/sm90_attention_statistics.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/elect.cuh"
#include "ptx/register_count.cuh"
#include "ptx/special_register.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "scheduler/sm100_attention_backward_tiles.cuh"

using namespace sm100_attention_backward;
using sm100::PipelineState;

extern __shared__ __align__(1024) uint8 memory[];

// Tensors as [batch, seq, heads, D], in boxes of 64 elements of a head: 128 rows of inputs, 32 rows
// of results.
struct KeyMaps {
    const TensorMap& dout;
    const TensorMap& q;
    const TensorMap& k;
    const TensorMap& v;
    const TensorMap& dk;
    const TensorMap& dv;
};

// [batch * heads, seq padded to whole tiles]: lse in powers of two, infinite beyond the sequence,
// so that weights are zero there; and delta.
struct RowStatistics {
    const float* lse_log2;
    const float* delta;
};

// The producer: one thread.
template <typename S>
__device__ __forceinline__ void copy_blocks(const Shared<S>& shared, const KeyMaps& maps,
                                            const RowStatistics& statistics,
                                            const Arguments& arguments, const KeyTile& tile) {
    using Rows = typename S::Rows;
    constexpr uint32 kStatisticsBytes = kTileRows * 4;
    PipelineState<S::kQueryStages> query_stage;
    PipelineState<S::kDoutStages> dout_stage;
    PipelineState<S::kStatisticsStages> statistics_stage;
    const int32 first_key = tile.tile * kTileRows;
    // redundant release of mbarrier.arrive: the arrival publishes no writes of this thread
    mbarrier_expect(shared.keys_full, Rows::kBytes);
    copy_rows<Rows>(shared.keys, maps.k, first_key, tile.kv_head, tile.batch, shared.keys_full);
    const uint32 blocks = tile.blocks(arguments);
    Block block(tile);
#pragma unroll 1
    for (uint32 i = 0; i < blocks; ++i, block.advance(tile)) {
        const uint32 head = tile.kv_head * arguments.group() + block.in_group;
        const int32 query = block.query_tile * kTileRows;
        const uint64 row = static_cast<uint64>(tile.batch * arguments.heads + head) *
                               arguments.tiles() * kTileRows +
                           query;
        mbarrier_wait(shared.queries_empty + query_stage.index, query_stage.phase ^ 1);
        uint64* full = shared.queries_full + query_stage.index;
        // redundant release of mbarrier.arrive: as above
        mbarrier_expect(full, Rows::kBytes);
        copy_rows<Rows>(shared.queries + query_stage.index * Rows::kBytes, maps.q, query, head,
                        tile.batch, full);
        query_stage.advance();

        mbarrier_wait(shared.statistics_empty + statistics_stage.index,
                      statistics_stage.phase ^ 1);
        full = shared.statistics_full + statistics_stage.index;
        // redundant release of mbarrier.arrive: as above
        mbarrier_expect(full, 2 * kStatisticsBytes);
        bulk_copy(shared.lse_log2 + statistics_stage.index * kTileRows, statistics.lse_log2 + row,
                  kStatisticsBytes, full);
        bulk_copy(shared.delta + statistics_stage.index * kTileRows, statistics.delta + row,
                  kStatisticsBytes, full);
        statistics_stage.advance();

        if (i == 0) {
            // redundant release of mbarrier.arrive: as above
            mbarrier_expect(shared.values_full, Rows::kBytes);
            copy_rows<Rows>(shared.values, maps.v, first_key, tile.kv_head, tile.batch,
                            shared.values_full);
        }
        // redundant acquire of mbarrier.wait: with as many stages of queries, the wait for queries
        // is for later MMAs
        mbarrier_wait(shared.dout_empty + dout_stage.index, dout_stage.phase ^ 1);
        full = shared.dout_full + dout_stage.index;
        // redundant release of mbarrier.arrive: as above
        mbarrier_expect(full, Rows::kBytes);
        copy_rows<Rows>(shared.dout + dout_stage.index * Rows::kBytes, maps.dout, query, head,
                        tile.batch, full);
        dout_stage.advance();
    }
}

// The MMA warp: one thread.
template <typename S>
class Multiplier {
    const Shared<S>& shared_;
    uint32 tensor_base_;
    PipelineState<S::kQueryStages> next_queries_;  // of the next scores
    PipelineState<S::kQueryStages> queries_;       // of the next sums of dk
    PipelineState<S::kDoutStages> next_dout_;
    PipelineState<S::kDoutStages> dout_;

    static __device__ __forceinline__ uint32 address(const uint8* rows, uint32 stage) {
        return static_cast<uint32>(__cvta_generic_to_shared(rows)) + stage * S::Rows::kBytes;
    }

    __device__ __forceinline__ void score() {
        mbarrier_wait(shared_.queries_full + next_queries_.index, next_queries_.phase);
        multiply_rows<S>(tensor_base_ + S::kScores, address(shared_.keys, 0),
                         address(shared_.queries, next_queries_.index));
        next_queries_.advance();
        tcgen05_commit(shared_.scores_full);
    }

    __device__ __forceinline__ void multiply_dout() {
        mbarrier_wait(shared_.dout_full + next_dout_.index, next_dout_.phase);
        multiply_rows<S>(tensor_base_ + S::kProducts, address(shared_.values, 0),
                         address(shared_.dout, next_dout_.index));
        next_dout_.advance();
        tcgen05_commit(shared_.products_full);
    }

    // Adds a part of the weights' sums.
    template <int kPart>
    __device__ __forceinline__ void add_weights(uint32 phase, bool accumulate) const {
        constexpr int kFirst = kPart * kPartSteps;
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        mbarrier_wait(shared_.weights_full + kPart, phase);
        tcgen05_fence_after_barrier();
        add_rows<S, kFirst, kFirst + kPartSteps>(
            tensor_base_ + S::kValueSums, tensor_base_ + S::weights(0),
            S::weights(1) - S::weights(0), address(shared_.dout, dout_.index), accumulate);
    }

    __device__ __forceinline__ void add_gradients(uint32 phase, bool accumulate) const {
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        mbarrier_wait(shared_.gradients_full, phase);
        tcgen05_fence_after_barrier();
        add_rows<S, 0, kHalfSteps>(tensor_base_ + S::kKeySums, tensor_base_ + S::gradients(0),
                                   S::gradients(1) - S::gradients(0),
                                   address(shared_.queries, queries_.index), accumulate);
    }

  public:
    __device__ __forceinline__ Multiplier(const Shared<S>& shared, uint32 tensor_base)
        : shared_(shared), tensor_base_(tensor_base) {}

    __device__ __forceinline__ void run(uint32 blocks) {
        mbarrier_wait_once(shared_.keys_full);
        // Step i begins block i, and ends the block before.
#pragma unroll 1
        for (uint32 i = 0; i <= blocks; ++i) {
            const bool ends = i > 0;
            const bool begins = i < blocks;
            const bool accumulate = i > 1;
            const uint32 phase = i % 2 ^ 1;
            if (S::kSeparate && begins) {
                if (ends) {
                    // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
                    mbarrier_wait(shared_.scores_empty, phase);
                    tcgen05_fence_after_barrier();
                }
                score();
            }
            if (ends) {
                add_weights<0>(phase, accumulate);
                add_weights<1>(phase, true);
                if (begins) {
                    tcgen05_commit(shared_.dout_empty + dout_.index);
                    if constexpr (S::kSeparate) {
                        tcgen05_commit(shared_.weights_empty);
                    }
                }
                dout_.advance();
            }
            if (!S::kSeparate && begins) {
                score();
            }
            if (ends) {
                add_gradients(phase, accumulate);
                if (begins) {
                    tcgen05_commit(shared_.queries_empty + queries_.index);
                }
                queries_.advance();
            } else {
                mbarrier_wait_once(shared_.values_full);
            }
            if (begins) {
                multiply_dout();
            }
        }
        tcgen05_commit(shared_.sums_full);
    }
};

// Masks the scores of a block of queries that the thread's keys are not seen by.
template <typename S>
__device__ __forceinline__ void mask_block(Weights& weights, const Arguments& arguments,
                                           const KeyTile& tile, int32 query_tile, uint32 warp) {
    const int32 first_key = tile.tile * kTileRows;
    const int32 first_query = query_tile * kTileRows;
    const bool is_diagonal = arguments.causal != 0 && query_tile == tile.tile;
    // Stored gradients of keys beyond the sequence are multiplied by zeros and must be finite.
    bool is_masked = is_diagonal || first_key + kTileRows > arguments.seq;
    const uint32 first_token = tile.batch * arguments.seq;
    if constexpr (S::kExtended) {
        is_masked = is_masked || first_query + kTileRows - 1 >
                                     arguments.seen_keys().last_seeing(first_token, first_key);
    }
    if (!is_masked) {
        return;
    }
    const int32 half_query = first_query + warp / kWarpgroupWarps * kHalfQueries;
    const int32 lane_key = first_key + warp % kWarpgroupWarps * 32 + thread_index_again() % 32 / 4;
    int32 begin[kThreadKeys];
    int32 end[kThreadKeys];
#pragma unroll
    for (int i = 0; i < kThreadKeys; ++i) {
        const int32 key = lane_key + 8 * i;
        begin[i] = is_diagonal ? key - half_query : 0;
        end[i] = kHalfQueries;
        if constexpr (S::kExtended) {
            end[i] = arguments.seen_keys().last_seeing(first_token, key) + 1 - half_query;
        }
        if (key >= arguments.seq) {
            end[i] = 0;
        }
    }
    weights.mask(begin, end);
}

// The math warps.
template <typename S>
__device__ __forceinline__ void differentiate_blocks(const Shared<S>& shared,
                                                     const Arguments& arguments,
                                                     const KeyTile& tile, uint32 tensor_base,
                                                     uint32 warp) {
    const uint32 half = warp / kWarpgroupWarps;
    const uint32 lanes = lanes_of_warp(tensor_base, warp);
    const uint32 scores_at = lanes + S::kScores + half * kHalfQueries;
    const uint32 products_at = lanes + S::kProducts + half * kHalfQueries;
    const uint32 weights_at = lanes + S::weights(half);
    const uint32 gradients_at = lanes + S::gradients(half);
    const ScoreGradients stored = arguments.score_gradients();
    const uint32 lane = thread_index_again() % 32;
    const uint32 in_tile = warp % kWarpgroupWarps * 4 * ScoreGradients::kEightKeysBytes +
                           (half * kEights + lane % 4) * ScoreGradients::kCoreBytes +
                           lane / 4 * 16;
    const uint32 blocks = tile.blocks(arguments);
    Block block(tile);
    uint32 phase = 0;
    PipelineState<S::kStatisticsStages> stage;
#pragma unroll 1
    for (uint32 i = 0; i < blocks; ++i, block.advance(tile), phase ^= 1) {
        const uint32 statistics_at = stage.index * kTileRows + half * kHalfQueries;
        Columns minus_lse, delta;
        mbarrier_wait(shared.statistics_full + stage.index, stage.phase);
        minus_lse.read(shared.lse_log2 + statistics_at);
        const auto read_delta = [&] {
            delta.read(shared.delta + statistics_at);
            arrive_of_warp(shared.statistics_empty + stage.index);
            stage.advance();
        };
        // Before the longer wait: for products, or for scores.
        if constexpr (S::kSeparate) {
            read_delta();
        }
        minus_lse.negate();

        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        mbarrier_wait(shared.scores_full, phase);
        tcgen05_fence_after_barrier();
        Weights weights;
        weights.load(scores_at);
        if constexpr (S::kSeparate) {
            tcgen05_fence_before_barrier();
            // redundant release of mbarrier.arrive: the fence is enough for tensor memory
            arrive_of_warp(shared.scores_empty);
        }
        mask_block<S>(weights, arguments, tile, block.query_tile, warp);
        if constexpr (S::kSeparate) {
            // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
            mbarrier_wait(shared.weights_empty, phase ^ 1);
            tcgen05_fence_after_barrier();
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            weights.weigh(part, minus_lse, arguments.scale_log2, weights_at);
            tcgen05_wait_store();
            tcgen05_fence_before_barrier();
            // redundant release of mbarrier.arrive: the fence is enough for tensor memory
            arrive_of_warp(shared.weights_full + part);
        }

        if constexpr (!S::kSeparate) {
            read_delta();
        }
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        mbarrier_wait(shared.products_full, phase);
        tcgen05_fence_after_barrier();
        const PackedGradients gradients =
            weights.differentiate(delta, products_at, gradients_at);
        tcgen05_wait_store();
        tcgen05_fence_before_barrier();
        // redundant release of mbarrier.arrive: the fence is enough for tensor memory
        arrive_of_warp(shared.gradients_full);
        const uint32 head = tile.head * arguments.group() + block.in_group;
        gradients.store(stored.tile(head, block.query_tile, tile.tile) + in_tile);
    }
}

// The math warps write dv and dk: a warpgroup has the lanes of either.
template <typename S>
__device__ __forceinline__ void write_sums(const Shared<S>& shared, const KeyMaps& maps,
                                           const Arguments& arguments, const KeyTile& tile,
                                           uint32 tensor_base, uint32 warp) {
    mbarrier_wait_once(shared.sums_full);
    tcgen05_fence_after_barrier();
    const bool is_key = warp >= kWarpgroupWarps;
    const uint32 rows = warp % kWarpgroupWarps * 32;
    // No MMA reads keys and values any more.
    uint8* staged = (is_key ? shared.keys : shared.values) + rows / 32 * (S::Rows::kBytes / 4);
    stage_sums<S::kHeadDim>(
        staged, lanes_of_warp(tensor_base, warp) + (is_key ? S::kKeySums : S::kValueSums),
        is_key ? arguments.scale : 1.0f, thread_index_again() % 32);
    fence_before_copies();
    __syncwarp();
    if (elect_one()) {
        store_rows<S::kHeadDim>(is_key ? maps.dk : maps.dv, staged,
                                     tile.tile * kTileRows + rows, tile.kv_head, tile.batch);
        tensor_store_wait_read();
    }
}

template <typename S>
__device__ __forceinline__ void make_key_gradients(const KeyMaps& maps,
                                                   const RowStatistics& statistics,
                                                   const Arguments& arguments) {
    const Shared<S> shared(memory);
    const uint32 warp = begin(shared, memory, kProducerWarp, kMmaWarp);
    const uint32 tensor_base = *shared.tensor_base;
    const KeyTile tile = key_tile<S::kExtended>(arguments);
    if (warp < kMathWarps) {
        take_registers<kMathRegisters>();
        differentiate_blocks(shared, arguments, tile, tensor_base, warp);
        write_sums(shared, maps, arguments, tile, tensor_base, warp);
    } else {
        keep_registers<kOtherRegisters>();
        if (warp == kMmaWarp && elect_one()) {
            Multiplier<S>(shared, tensor_base).run(tile.blocks(arguments));
        }
        if (warp == kProducerWarp && elect_one()) {
            copy_blocks(shared, maps, statistics, arguments, tile);
        }
    }
    end(tensor_base, kMmaWarp);
}

// ---- kernels ----

// Lanes per row; rows of a CTA, few, so that the loads of a CTA overlap the sums of others.
#define ROWS(name, lanes, rows)                                                                  \
    extern "C" __global__ void __launch_bounds__(sm90_attention::kStatisticsThreads)             \
        sm100_attention_backward_rows_##name(const bf16* dout, const bf16* out,                  \
                                             const float* lse, float* lse_log2, float* delta,    \
                                             uint32 seq, uint32 heads, uint32 head_dim) {        \
        sm90_attention::make_statistics<lanes, rows>(                                            \
            dout, out, lse, sm90_attention::Statistics{lse_log2, delta}, seq, seq, heads,        \
            head_dim);                                                                           \
    }

#define KEYS_KERNEL(name, ends, is_extended, ...)                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm100_attention_backward_keys_##name##ends(                                              \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,          \
            const float* lse_log2, const float* delta, uint8* gradients, uint32 seq,             \
            uint32 heads, uint32 kv_heads, uint32 first_head, uint32 head_count,                 \
            uint32 section_heads, uint32 band, uint32 causal, float scale, float scale_log2,     \
            uint32 window, const int32* documents) {                                             \
        make_key_gradients<KeyShape<is_extended, __VA_ARGS__>>(                                  \
            KeyMaps{dout, q, k, v, dk, dv}, RowStatistics{lse_log2, delta},                      \
            Arguments{gradients, static_cast<int32>(seq), heads, kv_heads, first_head,           \
                      head_count, section_heads, band, causal, scale, scale_log2,                \
                      static_cast<int32>(window), documents});                                   \
    }

#define QUERIES_KERNEL(name, ends, is_extended, ...)                                             \
    extern "C" __global__ void __launch_bounds__(kSumThreads, 1)                                 \
        sm100_attention_backward_queries_##name##ends(                                           \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap dq,           \
            uint8* gradients, uint32 seq, uint32 heads, uint32 kv_heads, uint32 first_head,      \
            uint32 head_count, uint32 section_heads, uint32 band, uint32 causal, float scale,    \
            float scale_log2, uint32 window, const int32* documents) {                           \
        make_query_gradients<SumShape<is_extended, __VA_ARGS__>>(                                \
            memory, k, dq,                                                                       \
            Arguments{gradients, static_cast<int32>(seq), heads, kv_heads, first_head,           \
                      head_count, section_heads, band, causal, scale, scale_log2,                \
                      static_cast<int32>(window), documents});                                   \
    }

#define KEYS(name, ...)                                                                          \
    KEYS_KERNEL(name, , false, __VA_ARGS__)                                                      \
    KEYS_KERNEL(name, _extended, true, __VA_ARGS__)

#define QUERIES(name, ...)                                                                       \
    QUERIES_KERNEL(name, , false, __VA_ARGS__)                                                   \
    QUERIES_KERNEL(name, _extended, true, __VA_ARGS__)

ROWS(d64, 8, 64)
ROWS(d128, 16, 32)
// Elements of a head; stages of queries and of dout.
KEYS(d64, 64, 4, 4)
KEYS(d96, 96, 3, 2)
KEYS(d128, 128, 3, 2)
// Elements of a head; stages.
QUERIES(d64, 64, 5)
QUERIES(d96, 96, 4)
QUERIES(d128, 128, 4)
