// Attention on tcgen05: warp roles, layout of shared and tensor memory, and MMAs of a tile.
//
// A tile has two halves of 128 queries: half 0 the later queries, half 1 the earlier. A half has a
// row of scores in each lane of tensor memory. Scores are FP32 of `kBlockN` keys; weights are BF16
// and replace the scores that they were computed from, unless tensor memory has room for both.
#pragma once

#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "layout/wgmma_rows.cuh"
#include "ptx/special_register.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"

namespace sm100_attention {

constexpr int kHalves = 2;
constexpr int kHalfM = 128;   // queries of a half
constexpr int kBlockN = 128;  // keys of a block
constexpr int kTensorColumns = 512;
constexpr int kSharedLimit = 227 * 1024;

// Warps: four for the softmax of each half, four for corrections and results, one for MMAs, one
// for copies. The other warps of the last warpgroup do nothing.
constexpr int kWarpgroupWarps = 4;
constexpr int kCorrectionWarp = kHalves * kWarpgroupWarps;
constexpr int kMmaWarp = kCorrectionWarp + kWarpgroupWarps;
constexpr int kProducerWarp = kMmaWarp + 1;
constexpr int kThreads = 32 * (kMmaWarp + kWarpgroupWarps);
// Warps that learn the number of a tile from the producer.
constexpr int kTileReaders = kMmaWarp + 1;

// Registers per thread of the warpgroups. The CTA's total is that at launch. With this division
// ptxas spills none.
constexpr int kSoftmaxRegisters = 176;
constexpr int kCorrectionRegisters = 88;
constexpr int kOtherRegisters = 72;
static_assert(2 * kSoftmaxRegisters + kCorrectionRegisters + kOtherRegisters == 4 * 128,
              "65,536 registers of an SM");

// The last keys of a block whose weights arrive separately: MMAs of the others begin before.
constexpr int kKeysOfStep = 16;
constexpr int kSteps = kBlockN / kKeysOfStep;
constexpr int kFirstSteps = kSteps * 3 / 4;

template <bool kTakesMore, int kHeadElements, int kRingStages>
struct Shape {
    static constexpr bool kExtended = kTakesMore;
    static constexpr int kHeadDim = kHeadElements;
    static constexpr int kStages = kRingStages;  // blocks of keys or values
    static constexpr int kTileSlots = 2;         // tile numbers
    // Queries of a half, a block of keys or of values, results of a half.
    using Rows = WgmmaRows<kBlockN, kHeadDim>;
    static_assert(kHalfM == kBlockN, "all of one size");

    static constexpr int kResultBytes = Rows::kBytes;  // [4 warps][chunks][32][128], swizzled
    static constexpr int kFactorBytes = kHalves * kHalfM * 4;
    static constexpr int kBarrierBytes =
        (8 * kHalves + 2 * kStages + 2 * kTileSlots) * 8 + kTileSlots * 4 + 8;
    static constexpr int kSharedBytes = 1024 + (kHalves + kStages) * Rows::kBytes + kResultBytes +
                                        kFactorBytes + kBarrierBytes;
    static_assert(kSharedBytes <= kSharedLimit, "what a CTA may have");

    // Columns of tensor memory.
    static constexpr uint32 kFirstSum = kHalves * kBlockN;
    static constexpr uint32 kFirstWeight = kFirstSum + kHalves * kHeadDim;
    static constexpr uint32 kWeightColumns = kBlockN / 2;
    static constexpr bool kSeparateWeights =
        kFirstWeight + kHalves * kWeightColumns <= kTensorColumns;
    static_assert(kFirstWeight <= kTensorColumns, "scores and sums fit");

    static __device__ __forceinline__ constexpr uint32 scores(uint32 half) {
        return half * kBlockN;
    }

    static __device__ __forceinline__ constexpr uint32 sums(uint32 half) {
        return kFirstSum + half * kHeadDim;
    }

    static __device__ __forceinline__ constexpr uint32 weights(uint32 half) {
        return kSeparateWeights ? kFirstWeight + half * kWeightColumns
                                : half * kBlockN + kBlockN - kWeightColumns;
    }
};

// Shared memory, from a 1024-byte boundary on.
template <typename S>
struct Shared {
    uint8* queries;  // [kHalves]
    uint8* ring;     // [kStages] blocks of keys and of values by turns
    uint8* results;
    float* factors;             // [kHalves][kHalfM] of the sums so far
    uint64* queries_full;       // [kHalves]
    uint64* queries_empty;      // [kHalves]
    uint64* full;               // [kStages]
    uint64* empty;              // [kStages]
    // [kHalves] Complete are:
    uint64* scores_full;        // scores of a block; the factors written before were read
    uint64* weights_full;       // the first weights; corrections of sums
    uint64* last_weights_full;  // the other weights
    uint64* sums_full;          // sums of all blocks; the factors written before were read
    // The same with separate weights:
    uint64* scores_empty;       // loads of the scores
    uint64* weights_empty;      // sums of a block
    uint64* tiles_full;         // [kTileSlots]
    uint64* tiles_empty;        // [kTileSlots]
    uint32* tiles;              // [kTileSlots] tile numbers
    uint32* tensor_base;
    volatile float* scale_log2;

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        queries = memory + (-address & 1023);
        ring = queries + kHalves * S::Rows::kBytes;
        results = ring + S::kStages * S::Rows::kBytes;
        factors = reinterpret_cast<float*>(results + S::kResultBytes);
        queries_full = reinterpret_cast<uint64*>(factors + kHalves * kHalfM);
        queries_empty = queries_full + kHalves;
        full = queries_empty + kHalves;
        empty = full + S::kStages;
        scores_full = empty + S::kStages;
        weights_full = scores_full + kHalves;
        last_weights_full = weights_full + kHalves;
        sums_full = last_weights_full + kHalves;
        scores_empty = sums_full + kHalves;
        weights_empty = scores_empty + kHalves;
        tiles_full = weights_empty + kHalves;
        tiles_empty = tiles_full + S::kTileSlots;
        tiles = reinterpret_cast<uint32*>(tiles_empty + S::kTileSlots);
        tensor_base = tiles + S::kTileSlots;
        scale_log2 = reinterpret_cast<float*>(tensor_base + 1);
    }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kHalves; ++i) {
            mbarrier_set(queries_full + i);
            mbarrier_set(queries_empty + i);
            mbarrier_set(scores_full + i, 1 + kWarpgroupWarps);
            mbarrier_set(weights_full + i, 2 * kWarpgroupWarps);
            mbarrier_set(last_weights_full + i, kWarpgroupWarps);
            mbarrier_set(sums_full + i, 1 + kWarpgroupWarps);
            if (S::kSeparateWeights) {
                mbarrier_set(scores_empty + i, kWarpgroupWarps);
                mbarrier_set(weights_empty + i);
            }
        }
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(full + i);
            mbarrier_set(empty + i);
        }
        for (int i = 0; i < S::kTileSlots; ++i) {
            mbarrier_set(tiles_full + i);
            mbarrier_set(tiles_empty + i, kTileReaders);
        }
        mbarrier_publish();
    }
};

// Arrives for the calling warp: all its lanes are done.
__device__ __forceinline__ void arrive_of_warp(uint64* barrier) {
    __syncwarp();
    if (thread_index_again() % 32 == 0) {
        mbarrier_arrive(barrier);
    }
}

// Issues scores = queries keys^T.
template <typename S>
__device__ __forceinline__ void multiply_keys(uint32 scores, uint32 queries, uint32 keys) {
    using Rows = typename S::Rows;
    constexpr uint32 kInstruction = tcgen05_bf16_instruction(kHalfM, kBlockN, true, true);
    const Tcgen05Matrices a(tcgen05_swizzled_matrix(queries));
    const Tcgen05Matrices b(tcgen05_swizzled_matrix(keys));
#pragma unroll
    for (int step = 0; step < Rows::kSteps; ++step) {
        const uint32 bytes = Rows::column_step(step);
        // redundant leading offset of A, leading offset of B: unused in swizzled K-major rows
        tcgen05_multiply_f16<1>(scores, a.at(bytes), b.at(bytes), kInstruction, step > 0);
    }
}

// Issues sums (+)= weights values for the keys of steps kFirst to kEnd.
template <typename S, int kFirst, int kEnd>
__device__ __forceinline__ void multiply_values(uint32 sums, uint32 weights, uint32 values,
                                                bool accumulate) {
    using Rows = typename S::Rows;
    constexpr uint32 kInstruction = tcgen05_bf16_instruction(kHalfM, S::kHeadDim, true, false);
    const Tcgen05Matrices b(tcgen05_transposed_matrix(values, Rows::kChunkBytes));
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
        // redundant leading offset of B: unused in the single box of a head of 64
        tcgen05_multiply_f16_from_tensor(sums, weights + step * (kKeysOfStep / 2),
                                         b.at(Rows::row_step(step)), kInstruction,
                                         accumulate || step > kFirst);
    }
}

}  // namespace sm100_attention
