// Causal or full attention with grouped query heads on tcgen05: out = softmax(scale q k^T) v and
// lse, the natural logarithm of each row's sum of exponentials.
//
// q, out [batch * seq, heads * D], k, v [batch * seq, kv_heads * D] BF16, lse [batch, heads, seq]
// FP32. Query head h reads key and value head h / (heads / kv_heads). Heads narrower than a
// kernel's width, in whole units of 16 bytes, are zero-padded in shared memory.
//
// A CTA computes a tile of 256 queries, two halves of 128, over blocks of 128 keys from the last
// visible block to the first. Scores, weights and sums are in tensor memory. Warps have roles:
//   softmax     four warps of each half: a thread has a row of scores, and replaces it by weights;
//   correction  four warps: multiply sums so far when a row's reference rises, and write results;
//   MMA         one thread issues, for each block and half, the sums of the previous block's
//               weights and then the scores, so that one half has its softmax while the tensor
//               cores work for the other;
//   producer    one thread takes tiles from a counter, the longest first, and issues the copies.
// Sums of the first three quarters of a block's weights begin before the last quarter is there.
//
// Scores of a block overwrite the weights that the previously issued MMA of this half reads. Wider
// heads leave no room for both. MMAs of one thread run in the order of their issue on current
// hardware; the PTX ISA orders only MMAs of one accumulator (docs/emulator.md, `--mma-order`).
//
// Kernels whose names end in `_extended` support windows, sinks and documents as in attention.cu;
// blocks of keys before all windows or documents of a half are skipped.
//
// Results do not depend on the assignment of tiles to CTAs: a tile's keys are summed in one order.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/sm100_attention.cuh"
#include "mma/sm100_attention_softmax.cuh"
#include "mma/sm100_attention_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/exp2.cuh"
#include "ptx/register_count.cuh"
#include "ptx/release.cuh"
#include "ptx/special_register.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "scheduler/sm100_attention_tiles.cuh"

using namespace sm100_attention;

extern __shared__ __align__(1024) uint8 memory[];

// q, k, v and out as [batch, seq, heads, D], in boxes of 64 elements of a head: 128 rows of q, k
// and v, 32 rows of out.
struct Maps {
    const TensorMap& q;
    const TensorMap& k;
    const TensorMap& v;
    const TensorMap& out;
};

// Copies all columns of 128 rows of a head, from row `row` on.
template <typename S>
__device__ __forceinline__ void copy_rows(uint8* target, const TensorMap& map, int32 row,
                                          uint32 head, uint32 batch, uint64* full) {
    // redundant release of mbarrier.arrive: the arrival publishes no writes of this thread
    mbarrier_expect(full, S::Rows::kBytes);
#pragma unroll
    for (uint32 chunk = 0; chunk < S::Rows::kChunks; ++chunk) {
        const TensorPlace place{
            {chunk * kChunkColumns, head, static_cast<uint32>(row), batch}};
        tensor_copy_4d(target + chunk * S::Rows::kChunkBytes, map, place, full);
    }
}

// A block of keys or values.
struct KeyPlace {
    int32 first_key;
    uint32 kv_head;
    uint32 batch;
};

// The producer: one thread. Copies are in the order of use, see `Multiplier::step`.
template <typename S>
class Producer {
    const Shared<S>& shared_;
    const Maps& maps_;
    const Arguments& arguments_;
    PipelineState<S::kStages> stage_;
    uint32 query_phases_ = 0;  // a bit for each half

    __device__ __forceinline__ void copy_block(const TensorMap& map, const KeyPlace& place) {
        mbarrier_wait(shared_.empty + stage_.index, stage_.phase ^ 1);
        copy_rows<S>(shared_.ring + stage_.index * S::Rows::kBytes, map, place.first_key,
                     place.kv_head, place.batch, shared_.full + stage_.index);
        stage_.advance();
    }

    __device__ __forceinline__ void copy_queries(const QueryTile& tile) {
#pragma unroll
        for (uint32 half = 0; half < kHalves; ++half) {
            if (tile.blocks[half].end > 0) {
                mbarrier_wait(shared_.queries_empty + half, query_phases_ >> half & 1 ^ 1);
                query_phases_ ^= 1 << half;
                copy_rows<S>(shared_.queries + half * S::Rows::kBytes, maps_.q,
                             tile.first_of(half), tile.head, tile.batch,
                             shared_.queries_full + half);
            }
        }
    }

  public:
    __device__ __forceinline__ Producer(const Shared<S>& shared, const Maps& maps,
                                        const Arguments& arguments)
        : shared_(shared), maps_(maps), arguments_(arguments) {}

    __device__ __forceinline__ void run() {
        const Tiles<S> tiles(arguments_);
        TileWriter<S> writer;
        KeyPlace previous{-1, 0, 0};
        for (uint32 number = blockIdx.x;;) {
            writer.pass(shared_, number);
            if (number >= tiles.all) {
                break;
            }
            const QueryTile tile = tiles.at(number, arguments_);
            // Prefetches the next tile's number.
            number = gridDim.x + atomicAdd(arguments_.counters, 1u);
            const uint32 kv_head = tile.head / (arguments_.heads / arguments_.kv_heads);
            const KeyBlocks blocks = tile.all_blocks();
#pragma unroll 1
            for (int32 block = blocks.end - 1; block >= blocks.begin; --block) {
                const KeyPlace place{block * kBlockN, kv_head, tile.batch};
                if (!S::kSeparateWeights && previous.first_key >= 0) {
                    copy_block(maps_.v, previous);
                }
                copy_block(maps_.k, place);
                if (block == blocks.end - 1) {
                    copy_queries(tile);
                }
                if (S::kSeparateWeights && previous.first_key >= 0) {
                    copy_block(maps_.v, previous);
                }
                previous = place;
            }
        }
        copy_block(maps_.v, previous);
        // The last CTA resets the counters.
        if (add_acquire_release(arguments_.counters + 1, 1) == gridDim.x - 1) {
            arguments_.counters[0] = 0;
            arguments_.counters[1] = 0;
        }
    }
};

// What happens to a block of keys, a bit for each half.
struct BlockStep {
    uint32 sees;
    uint32 begins;  // the half's first processed block
    uint32 ends;    // and its last

    __device__ __forceinline__ static BlockStep none() {
        return BlockStep{0, 0, 0};
    }

    __device__ __forceinline__ static BlockStep of(const QueryTile& tile, int32 block) {
        BlockStep step = none();
#pragma unroll
        for (uint32 half = 0; half < kHalves; ++half) {
            const KeyBlocks& blocks = tile.blocks[half];
            step.sees |= static_cast<uint32>(blocks.has(block)) << half;
            step.begins |= static_cast<uint32>(block == blocks.end - 1) << half;
            step.ends |= static_cast<uint32>(block == blocks.begin) << half;
        }
        return step;
    }
};

// The MMA warp: one thread.
template <typename S>
class Multiplier {
    const Shared<S>& shared_;
    uint32 tensor_base_;
    uint32 queries_at_;
    uint32 ring_at_;
    PipelineState<S::kStages> stage_;
    uint32 query_phases_ = 0;  // a bit for each half
    uint32 weight_phases_ = 0;
    uint32 score_phases_ = 0;

    __device__ __forceinline__ uint32 ring(uint32 stage) const {
        return ring_at_ + stage * S::Rows::kBytes;
    }

    __device__ __forceinline__ void add_values(uint32 half, uint32 values, bool begins,
                                               bool ends) {
        const uint32 sums = tensor_base_ + S::sums(half);
        const uint32 weights = tensor_base_ + S::weights(half);
        const uint32 phase = weight_phases_ >> half & 1;
        weight_phases_ ^= 1 << half;
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        mbarrier_wait(shared_.weights_full + half, phase);
        tcgen05_fence_after_barrier();
        multiply_values<S, 0, kFirstSteps>(sums, weights, values, !begins);
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        mbarrier_wait(shared_.last_weights_full + half, phase);
        tcgen05_fence_after_barrier();
        multiply_values<S, kFirstSteps, kSteps>(sums, weights, values, true);
        if constexpr (S::kSeparateWeights) {
            // redundant tcgen05.commit: nobody waits for the sums of a CTA's last block
            tcgen05_commit(shared_.weights_empty + half);
        }
        if (ends) {
            tcgen05_commit(shared_.sums_full + half);
        }
    }

    __device__ __forceinline__ void score(uint32 half, uint32 keys, bool begins, bool ends) {
        if (begins) {
            mbarrier_wait(shared_.queries_full + half, query_phases_ >> half & 1);
            query_phases_ ^= 1 << half;
        }
        if constexpr (S::kSeparateWeights) {
            mbarrier_wait(shared_.scores_empty + half, score_phases_ >> half & 1 ^ 1);
            score_phases_ ^= 1 << half;
            tcgen05_fence_after_barrier();
        }
        multiply_keys<S>(tensor_base_ + S::scores(half), queries_at_ + half * S::Rows::kBytes,
                         keys);
        tcgen05_commit(shared_.scores_full + half);
        if (ends) {
            tcgen05_commit(shared_.queries_empty + half);
        }
    }

    // Adds the values of the previous block, and computes the scores of the next: before, if these
    // do not overwrite the weights of the previous block.
    __device__ __forceinline__ void step(const BlockStep& previous, const BlockStep& next) {
        const auto take_stage = [&](bool is_used) {
            const PipelineState<S::kStages> taken = stage_;
            if (is_used) {
                stage_.advance();
            }
            return taken;
        };
        PipelineState<S::kStages> key_stage, value_stage;
        if constexpr (S::kSeparateWeights) {
            key_stage = take_stage(next.sees != 0);
            value_stage = take_stage(previous.sees != 0);
        } else {
            value_stage = take_stage(previous.sees != 0);
            key_stage = take_stage(next.sees != 0);
        }
        const auto score_half = [&](uint32 half) {
            if (half == 0 && next.sees != 0) {
                mbarrier_wait(shared_.full + key_stage.index, key_stage.phase);
            }
            if ((next.sees >> half & 1) != 0) {
                score(half, ring(key_stage.index), next.begins >> half & 1,
                      next.ends >> half & 1);
            }
            if (half == kHalves - 1 && next.sees != 0) {
                tcgen05_commit(shared_.empty + key_stage.index);
            }
        };
        const auto add_half = [&](uint32 half) {
            if (half == 0 && previous.sees != 0) {
                mbarrier_wait(shared_.full + value_stage.index, value_stage.phase);
            }
            if ((previous.sees >> half & 1) != 0) {
                add_values(half, ring(value_stage.index), previous.begins >> half & 1,
                           previous.ends >> half & 1);
            }
            // After the last block nothing is copied.
            if (half == kHalves - 1 && previous.sees != 0 && next.sees != 0) {
                tcgen05_commit(shared_.empty + value_stage.index);
            }
        };
#pragma unroll
        for (uint32 half = 0; half < kHalves; ++half) {
            if constexpr (S::kSeparateWeights) {
                score_half(half);
                add_half(half);
            } else {
                add_half(half);
                score_half(half);
            }
        }
    }

  public:
    __device__ __forceinline__ Multiplier(const Shared<S>& shared, uint32 tensor_base)
        : shared_(shared),
          tensor_base_(tensor_base),
          queries_at_(static_cast<uint32>(__cvta_generic_to_shared(shared.queries))),
          ring_at_(static_cast<uint32>(__cvta_generic_to_shared(shared.ring))) {}

    __device__ __forceinline__ void run(const Arguments& arguments) {
        TileReader<S, false> tiles(shared_, arguments);
        BlockStep previous = BlockStep::none();
        // A tile begins while the softmax of the previous tile's last block runs.
        for (QueryTile tile; tiles.next(tile);) {
            const KeyBlocks blocks = tile.all_blocks();
#pragma unroll 1
            for (int32 block = blocks.end - 1; block >= blocks.begin; --block) {
                const BlockStep next = BlockStep::of(tile, block);
                step(previous, next);
                previous = next;
            }
        }
        step(previous, BlockStep::none());
    }
};

// Named barriers: a softmax warp signals the correction warp of the same rows.
__device__ __forceinline__ uint32 factors_barrier(uint32 half, uint32 warp) {
    return 1 + half * kWarpgroupWarps + warp;
}

// Address of a warp's lanes in tensor memory.
__device__ __forceinline__ uint32 lanes_of_warp(uint32 tensor_base, uint32 warp) {
    return tensor_base + (warp * 32 << 16);
}

// Finishes a row: writes lse. Returns the factor of the sums.
template <typename S>
__device__ __forceinline__ float finish(const RowSoftmax& softmax, const QueryTile& tile,
                                        int32 query, const Arguments& arguments) {
    float factor = 1.0f;
    float sum = softmax.sum();
    float reference = softmax.reference;
    if (S::kExtended && arguments.sinks != nullptr) {
        const float sink = arguments.sinks[tile.head] * kLog2E;
        const float raised = max_or_nan(reference, sink);
        factor = ex2(reference - raised);
        sum = fmaf(sum, factor, ex2(sink - raised));
        reference = raised;
    }
    if (query < arguments.seq) {
        const uint32 batch_head = tile.batch * arguments.heads + tile.head;
        arguments.lse[static_cast<uint64>(batch_head) * arguments.seq + query] =
            (reference + lg2(sum)) * kLn2;
    }
    return factor / sum;
}

// The softmax warps of a half: the half of the thread's number.
template <typename S>
__device__ __forceinline__ void weigh_half(const Shared<S>& shared, const Arguments& arguments,
                                           uint32 tensor_base) {
    const uint32 thread = thread_index_again();
    const uint32 half = thread / kHalfM;
    const int32 row = thread % kHalfM;
    const uint32 warp = row / 32;
    const uint32 lanes = lanes_of_warp(tensor_base, warp);
    const uint32 scores_at = lanes + S::scores(half);
    const uint32 weights_at = lanes + S::weights(half);
    float* factor = shared.factors + half * kHalfM + row;
    uint32 phase = 0;
    uint32 sums_phase = 0;
    TileReader<S, true> tiles(shared, arguments);
    for (QueryTile tile; tiles.next(tile);) {
        const KeyBlocks blocks = tile.blocks_of(half);
        const int32 first_query = tile.first_of(half);
        RowSoftmax softmax;
#pragma unroll 1
        for (int32 block = blocks.end - 1; block >= blocks.begin; --block) {
            mbarrier_wait(shared.scores_full + half, phase);
            phase ^= 1;
            tcgen05_fence_after_barrier();
            float scores[kBlockN];
            load_scores(scores, scores_at);
            if constexpr (S::kSeparateWeights) {
                tcgen05_fence_before_barrier();
                // redundant release of mbarrier.arrive: the fence is enough for tensor memory
                arrive_of_warp(shared.scores_empty + half);
            }
            const int32 first_key = block * kBlockN;
            int32 begin = 0;
            bool is_masked = first_key + kBlockN > arguments.seen_end(first_query);
            if constexpr (S::kExtended) {
                const SeenKeys seen = arguments.seen_keys();
                const uint32 first_token = tile.batch * arguments.seq;
                if (first_key < seen.first_seen(first_token, first_query + kHalfM - 1)) {
                    begin = seen.first_seen(first_token, first_query + row) - first_key;
                    is_masked = true;
                }
            }
            if (is_masked) {
                mask(scores, begin, arguments.seen_end(first_query + row) - first_key);
            }
            *factor = softmax.raise(scores, arguments.scale_log2);
            barrier_arrive(factors_barrier(half, warp), 64);
            // Read here and again below: later exponentials depend on it, so the compiler cannot
            // move them before the arrivals.
            float scale_log2 = *shared.scale_log2;
            if constexpr (S::kSeparateWeights) {
                // The wait of a block is for the sums of the block before.
                // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
                mbarrier_wait(shared.weights_empty + half, phase);
                tcgen05_fence_after_barrier();
            }
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                softmax.weigh(scores, part, scale_log2, weights_at);
                if (part == kParts - 2 || part == kParts - 1) {
                    tcgen05_wait_store();
                    tcgen05_fence_before_barrier();
                    uint64* full =
                        part == kParts - 1 ? shared.last_weights_full : shared.weights_full;
                    // redundant release of mbarrier.arrive: the fence is enough for tensor memory
                    arrive_of_warp(full + half);
                    scale_log2 = *shared.scale_log2;
                }
            }
            softmax.end(scores);
        }
        if (blocks.end > 0) {
            const float last = finish<S>(softmax, tile, first_query + row, arguments);
            mbarrier_wait(shared.sums_full + half, sums_phase);
            sums_phase ^= 1;
            *factor = last;
            barrier_arrive(factors_barrier(half, warp), 64);
        }
    }
}

// The correction warps.
template <typename S>
class Corrector {
    const Shared<S>& shared_;
    const Maps& maps_;
    uint32 row_;
    uint32 lanes_;
    uint32 phases_ = 0;  // of the weights, a bit for each half

    // The warp's results in shared memory. Recomputed at each use: registers are scarce.
    __device__ __forceinline__ uint8* staged() const {
        const uint32 warp = thread_index_again() % kHalfM / 32;
        return shared_.results + warp * (S::kResultBytes / kWarpgroupWarps);
    }

    // Returns the factor of the row's sums, and arrives at the barrier of the next factor.
    __device__ __forceinline__ float next_factor(uint32 half, uint64* read) const {
        barrier_sync(factors_barrier(half, row_ / 32), 64);
        const float factor = shared_.factors[half * kHalfM + row_];
        arrive_of_warp(read + half);
        return factor;
    }

    // Multiplies the sums before a block by the factors of the block.
    __device__ __forceinline__ void correct(uint32 half, bool begins, bool ends) {
        uint64* read = ends ? shared_.sums_full : shared_.scores_full;
        // redundant bar.warp.sync, release of mbarrier.arrive: where weights overwrite scores, the
        // arrival below orders reads
        const float factor = next_factor(half, read);
        if constexpr (S::kSeparateWeights) {
            // Without separate weights, factors come after the sums of the block before.
            // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
            mbarrier_wait(shared_.weights_empty + half, phases_ >> half & 1 ^ 1);
            phases_ ^= 1 << half;
        }
        tcgen05_fence_after_barrier();
        if (!begins && __any_sync(0xffffffffu, factor != 1.0f)) {
            scale_sums<S>(lanes_ + S::sums(half), factor);
        }
        tcgen05_fence_before_barrier();
        // redundant bar.warp.sync: nvcc gives this line to that of half 1's factor, see above
        // redundant release of mbarrier.arrive: the fence is enough for tensor memory
        arrive_of_warp(shared_.weights_full + half);
    }

    // Writes the results of a half.
    __device__ __forceinline__ void write(uint32 half, const QueryTile& tile) const {
        const float factor = next_factor(half, shared_.scores_full);
        tcgen05_fence_after_barrier();
        const bool is_storer = row_ % 32 == 0;
        if (is_storer) {
            tensor_store_wait_read();
        }
        __syncwarp();
        // The next correction lets the next tile's sums overwrite these.
        stage_results<S>(staged(), lanes_ + S::sums(half), factor);
        fence_before_copies();
        __syncwarp();
        if (is_storer) {
            store_results<S>(maps_.out, staged(), tile.first_of(half) + row_, tile.head,
                             tile.batch);
        }
    }

  public:
    __device__ __forceinline__ Corrector(const Shared<S>& shared, const Maps& maps,
                                         uint32 tensor_base)
        : shared_(shared),
          maps_(maps),
          row_(thread_index_again() % kHalfM),
          lanes_(lanes_of_warp(tensor_base, row_ / 32)) {}

    __device__ __forceinline__ void run(const Arguments& arguments) {
        clear_beyond_head<S>(staged());
        // No factors are unread yet.
        if (row_ % 32 == 0) {
            for (uint32 half = 0; half < kHalves; ++half) {
                // redundant release of mbarrier.arrive: there are no reads before
                mbarrier_arrive(shared_.scores_full + half);
            }
        }
        TileReader<S, true> tiles(shared_, arguments);
        for (QueryTile tile; tiles.next(tile);) {
            const KeyBlocks blocks = tile.all_blocks();
#pragma unroll 1
            for (int32 block = blocks.end - 1; block >= blocks.begin; --block) {
#pragma unroll
                for (uint32 half = 0; half < kHalves; ++half) {
                    const KeyBlocks& own = tile.blocks[half];
                    if (own.has(block)) {
                        correct(half, block == own.end - 1, block == own.begin);
                    }
                }
            }
#pragma unroll
            for (uint32 half = 0; half < kHalves; ++half) {
                if (tile.blocks[half].end > 0) {
                    write(half, tile);
                }
            }
        }
        if (row_ % 32 == 0) {
            tensor_store_wait_read();
        }
    }
};

template <typename S>
__device__ __forceinline__ void attend(const Maps& maps, const Arguments& arguments) {
    const Shared<S> shared(memory);
    // Uniform over the warp; the shuffle makes this known to the compiler.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == kProducerWarp && elect_one()) {
        shared.init_barriers();
        *shared.scale_log2 = arguments.scale_log2;
    }
    if (warp == kMmaWarp) {
        tcgen05_allocate_all<1>(shared.tensor_base);
    }
    __syncthreads();
    const uint32 tensor_base = *shared.tensor_base;
    if (warp < kCorrectionWarp) {
        take_registers<kSoftmaxRegisters>();
        weigh_half(shared, arguments, tensor_base);
    } else if (warp < kMmaWarp) {
        keep_registers<kCorrectionRegisters>();
        Corrector<S>(shared, maps, tensor_base).run(arguments);
    } else {
        keep_registers<kOtherRegisters>();
        if (warp == kMmaWarp && elect_one()) {
            Multiplier<S>(shared, tensor_base).run(arguments);
        }
        if (warp == kProducerWarp && elect_one()) {
            Producer<S>(shared, maps, arguments).run();
        }
    }
    // Correction warps have read all results, and so waited for all MMAs.
    // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
    __syncwarp();
    __syncthreads();
    if (thread_index_again() / 32 == kMmaWarp) {
        tcgen05_free_all<1>(tensor_base);
    }
}

#define SM100_ATTENTION(name, ...)                                                               \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) sm100_attention_##name(            \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,                \
        const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out, float* lse,  \
        uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch_heads,         \
        uint32 section_heads, uint32 causal, float scale_log2) {                                 \
        attend<Shape<false, __VA_ARGS__>>(                                                       \
            Maps{q, k, v, out},                                                                  \
            Arguments{lse, counters, static_cast<int32>(seq), heads, kv_heads, batch_heads,      \
                      section_heads, causal, scale_log2, static_cast<int32>(seq), nullptr,       \
                      nullptr});                                                                 \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, 1) sm100_attention_##name##_extended( \
        const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,                \
        const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out, float* lse,  \
        uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch_heads,         \
        uint32 section_heads, uint32 causal, float scale_log2, uint32 window,                    \
        const float* sinks, const int32* documents) {                                            \
        attend<Shape<true, __VA_ARGS__>>(                                                        \
            Maps{q, k, v, out},                                                                  \
            Arguments{lse, counters, static_cast<int32>(seq), heads, kv_heads, batch_heads,      \
                      section_heads, causal, scale_log2, static_cast<int32>(window), sinks,      \
                      documents});                                                               \
    }

SM100_ATTENTION(d64, 64, 8)
SM100_ATTENTION(d96, 96, 4)
SM100_ATTENTION(d128, 128, 4)
