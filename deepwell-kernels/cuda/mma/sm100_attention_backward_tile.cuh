// Gradients of attention on tcgen05: warp roles, layout of shared and tensor memory, and MMAs of a
// tile of 128 keys and 128 queries.
//
// Scores are transposed: a key has a lane of tensor memory, and queries are columns. Weights (p)
// and score gradients (ds) in BF16 are left operands in tensor memory. They replace the scores and
// the products dout v^T, unless tensor memory has room for both.
#pragma once

#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "layout/wgmma_rows.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special_register.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy_4d.cuh"

namespace sm100_attention_backward {

constexpr int kTileRows = 128;  // keys, and queries
constexpr int kTensorColumns = 512;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kStepQueries = 16;
constexpr int kSteps = kTileRows / kStepQueries;

// Warps: eight for weights and gradients, four of them for each half of the queries; one for MMAs,
// one for copies. The other warps of the last warpgroup do nothing.
constexpr int kWarpgroupWarps = 4;
constexpr int kHalves = 2;
constexpr int kMathWarps = kHalves * kWarpgroupWarps;
constexpr int kMmaWarp = kMathWarps;
constexpr int kProducerWarp = kMmaWarp + 1;
constexpr int kThreads = 32 * (kMmaWarp + kWarpgroupWarps);
constexpr int kHalfQueries = kTileRows / kHalves;
constexpr int kHalfSteps = kSteps / kHalves;
// MMAs of the first weights of either half begin before the others are there.
constexpr int kParts = 2;
constexpr int kPartQueries = kHalfQueries / kParts;
constexpr int kPartSteps = kHalfSteps / kParts;

// Registers per thread of the warpgroups. The CTA's total is that at launch.
constexpr int kMathRegisters = 192;
constexpr int kOtherRegisters = 120;
static_assert(2 * kMathRegisters + kOtherRegisters == 3 * 168, "registers at launch");

template <bool kTakesMore, int kHeadElements, int kQueryStageCount, int kDoutStageCount>
struct KeyShape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kQueryStages = kQueryStageCount;
    static constexpr int kDoutStages = kDoutStageCount;
    static constexpr int kStatisticsStages = 2;
    using Rows = WgmmaRows<kTileRows, kHeadDim>;

    static constexpr int kBarriers =
        2 + 2 * (kQueryStages + kDoutStages + kStatisticsStages) + 6 + kParts;
    static constexpr int kStatisticsBytes = kStatisticsStages * 2 * kTileRows * 4;
    // The array in shared memory is aligned to 1024 bytes.
    static constexpr int kSharedBytes = (2 + kQueryStages + kDoutStages) * Rows::kBytes +
                                        kStatisticsBytes + kBarriers * 8 + 8;
    static_assert(kSharedBytes <= kSharedLimit, "what a CTA may have");

    // Columns of tensor memory.
    static constexpr uint32 kScores = 0;
    static constexpr uint32 kProducts = kTileRows;
    static constexpr uint32 kKeySums = 2 * kTileRows;
    static constexpr uint32 kValueSums = kKeySums + kHeadDim;
    static constexpr uint32 kRest = kValueSums + kHeadDim;
    static constexpr uint32 kPackedColumns = kTileRows / 2;
    static constexpr bool kSeparate = kRest + 2 * kPackedColumns <= kTensorColumns;
    static_assert(kRest <= kTensorColumns, "scores, products and sums fit");

    // First column of packed weights or score gradients of a half of the queries. A half's warps
    // overwrite what they alone have read.
    static __device__ __forceinline__ constexpr uint32 weights(uint32 half) {
        return kSeparate ? kRest + half * (kHalfQueries / 2) : kScores + half * kHalfQueries;
    }

    static __device__ __forceinline__ constexpr uint32 gradients(uint32 half) {
        return kSeparate ? kRest + kPackedColumns + half * (kHalfQueries / 2)
                         : kProducts + half * kHalfQueries;
    }
};

// Shared memory of a tile of keys.
template <typename S>
struct Shared {
    uint8* keys;
    uint8* values;
    uint8* queries;             // [kQueryStages]
    uint8* dout;                // [kDoutStages]
    float* lse_log2;            // [kStatisticsStages][kTileRows]
    float* delta;               // [kStatisticsStages][kTileRows]
    uint64* keys_full;
    uint64* values_full;
    uint64* queries_full;       // [kQueryStages]
    uint64* queries_empty;      // [kQueryStages]
    uint64* dout_full;          // [kDoutStages]
    uint64* dout_empty;         // [kDoutStages]
    uint64* statistics_full;    // [kStatisticsStages]
    uint64* statistics_empty;   // [kStatisticsStages]
    // Complete are:
    uint64* scores_full;        // scores, and all MMAs before
    uint64* weights_full;       // [kParts] some of the weights of both halves
    uint64* products_full;      // dout v^T, and all MMAs before
    uint64* gradients_full;     // score gradients
    uint64* sums_full;          // all MMAs
    // The same with separate weights:
    uint64* scores_empty;       // loads of the scores
    uint64* weights_empty;      // sums of a block
    uint32* tensor_base;

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        keys = memory;
        values = keys + S::Rows::kBytes;
        queries = values + S::Rows::kBytes;
        dout = queries + S::kQueryStages * S::Rows::kBytes;
        lse_log2 = reinterpret_cast<float*>(dout + S::kDoutStages * S::Rows::kBytes);
        delta = lse_log2 + S::kStatisticsStages * kTileRows;
        keys_full = reinterpret_cast<uint64*>(delta + S::kStatisticsStages * kTileRows);
        values_full = keys_full + 1;
        queries_full = values_full + 1;
        queries_empty = queries_full + S::kQueryStages;
        dout_full = queries_empty + S::kQueryStages;
        dout_empty = dout_full + S::kDoutStages;
        statistics_full = dout_empty + S::kDoutStages;
        statistics_empty = statistics_full + S::kStatisticsStages;
        scores_full = statistics_empty + S::kStatisticsStages;
        weights_full = scores_full + 1;
        products_full = weights_full + kParts;
        gradients_full = products_full + 1;
        sums_full = gradients_full + 1;
        scores_empty = sums_full + 1;
        weights_empty = scores_empty + 1;
        tensor_base = reinterpret_cast<uint32*>(weights_empty + 1);
    }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        mbarrier_set(keys_full);
        mbarrier_set(values_full);
        for (int i = 0; i < S::kQueryStages; ++i) {
            mbarrier_set(queries_full + i);
            mbarrier_set(queries_empty + i);
        }
        for (int i = 0; i < S::kDoutStages; ++i) {
            mbarrier_set(dout_full + i);
            mbarrier_set(dout_empty + i);
        }
        for (int i = 0; i < S::kStatisticsStages; ++i) {
            mbarrier_set(statistics_full + i);
            mbarrier_set(statistics_empty + i, kMathWarps);
        }
        mbarrier_set(scores_full);
        for (int i = 0; i < kParts; ++i) {
            mbarrier_set(weights_full + i, kMathWarps);
        }
        mbarrier_set(products_full);
        mbarrier_set(gradients_full, kMathWarps);
        mbarrier_set(sums_full);
        if (S::kSeparate) {
            mbarrier_set(scores_empty, kMathWarps);
            mbarrier_set(weights_empty);
        }
        mbarrier_publish();
    }
};

// All threads, at the start: initializes barriers and tensor memory. Returns the warp's index.
template <typename AnyShared>
__device__ __forceinline__ uint32 begin(const AnyShared& shared, const uint8* memory,
                                        uint32 producer_warp, uint32 mma_warp) {
    if ((__cvta_generic_to_shared(memory) & 1023) != 0) {
        // The 128-byte swizzle depends on addresses; the declaration of the array asks for them.
        __trap();
    }
    // Uniform over the warp; the shuffle makes this known to the compiler.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == producer_warp && elect_one()) {
        shared.init_barriers();
    }
    if (warp == mma_warp) {
        tcgen05_allocate_all<1>(shared.tensor_base);
    }
    __syncthreads();
    return warp;
}

// All threads, at the end: warps that load from tensor memory have waited for all MMAs, and each
// for its own loads.
__device__ __forceinline__ void end(uint32 tensor_base, uint32 mma_warp) {
    // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
    __syncwarp();
    __syncthreads();
    if (thread_index_again() / 32 == mma_warp) {
        tcgen05_free_all<1>(tensor_base);
    }
}

// Arrives for the calling warp: all its lanes are done.
__device__ __forceinline__ void arrive_of_warp(uint64* barrier) {
    __syncwarp();
    if (thread_index_again() % 32 == 0) {
        mbarrier_arrive(barrier);
    }
}

// Address of a warp's lanes in tensor memory.
__device__ __forceinline__ uint32 lanes_of_warp(uint32 tensor_base, uint32 warp) {
    return tensor_base + (warp % kWarpgroupWarps * 32 << 16);
}

// Copies all columns of some rows of a head, from row `row` on.
template <typename Rows>
__device__ __forceinline__ void copy_rows(uint8* target, const TensorMap& map, int32 row,
                                          uint32 head, uint32 batch, uint64* full) {
#pragma unroll
    for (uint32 chunk = 0; chunk < Rows::kChunks; ++chunk) {
        const TensorPlace place{{chunk * kChunkColumns, head, static_cast<uint32>(row), batch}};
        tensor_copy_4d(target + chunk * Rows::kChunkBytes, map, place, full);
    }
}

// Issues target = a b^T over all columns of two tiles of rows in shared memory.
template <typename S>
__device__ __forceinline__ void multiply_rows(uint32 target, uint32 a_rows, uint32 b_rows) {
    using Rows = typename S::Rows;
    constexpr uint32 kInstruction = tcgen05_bf16_instruction(kTileRows, kTileRows, true, true);
    const Tcgen05Matrices a(tcgen05_swizzled_matrix(a_rows));
    const Tcgen05Matrices b(tcgen05_swizzled_matrix(b_rows));
#pragma unroll
    for (int step = 0; step < Rows::kSteps; ++step) {
        const uint32 bytes = Rows::column_step(step);
        // redundant leading offset of A, leading offset of B: unused in swizzled K-major rows
        tcgen05_multiply_f16<1>(target, a.at(bytes), b.at(bytes), kInstruction, step > 0);
    }
}

// Issues sums (+)= packed rows for the queries of steps kFirst to kEnd of each half. `packed` is in
// tensor memory, the second half `half_columns` beyond the first.
template <typename S, int kFirst, int kEnd>
__device__ __forceinline__ void add_rows(uint32 sums, uint32 packed, uint32 half_columns,
                                         uint32 rows, bool accumulate) {
    using Rows = typename S::Rows;
    constexpr uint32 kInstruction =
        tcgen05_bf16_instruction(kTileRows, S::kHeadDim, true, false);
    const Tcgen05Matrices b(tcgen05_transposed_matrix(rows, Rows::kChunkBytes));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
        for (int step = kFirst; step < kEnd; ++step) {
            // redundant leading offset of B: unused in the single box of a head of 64
            tcgen05_multiply_f16_from_tensor(
                sums, packed + half * half_columns + step * (kStepQueries / 2),
                b.at(Rows::row_step(half * kHalfSteps + step)), kInstruction,
                accumulate || half > 0 || step > kFirst);
        }
    }
}

}  // namespace sm100_attention_backward
