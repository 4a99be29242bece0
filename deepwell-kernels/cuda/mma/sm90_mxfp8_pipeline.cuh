// The pipeline of a GEMM of two MXFP8 matrices on wgmma, both K-major, where 128 elements along K
// share a scale: stages of 128 along K in shared memory, and the producer that fills them.
//
// A CTA has three warpgroups. One thread of the first, the producer, has boxes of both operands,
// swizzled by 128 bytes, and the tiles of their scales copied into the stages. The other two are
// consumers (mma/sm90_mxfp8_tile.cuh).
//
// CTAs of a cluster have tiles one below the other, which read the same rows of b, or side by side,
// which read the same rows of a: each copies a part of these to all of them. A stage is then free
// when the consumers of all have read it. Tiles beyond the result take part as others do, on zeros.
#pragma once

#include "common/opaque.cuh"
#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"

namespace sm90_mxfp8 {

constexpr int kStageK = 128;  // elements, and bytes of a row: one swizzle
constexpr int kStepK = 32;    // of one wgmma
constexpr int kSteps = kStageK / kStepK;
constexpr int kScaleBoxes = 2;  // rows of 256 bytes of a scale tile, as tensor maps see it

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Of a thread. All together are no more than those that a CTA starts with.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

constexpr int kSharedLimit = 227 * 1024;
constexpr int kAlignment = 1024;
constexpr int kBarrierBytes = 256;
constexpr int kStagedWarpBytes = 16 * 128;  // results of a warp on their way out
constexpr int kStagedBytes = kConsumerWarps * kStagedWarpBytes;

// A tile, and the CTAs of a cluster below each other and side by side, or those that share out K of
// one tile. `kScalesByColumn`: columns have scales of their own; otherwise 128 of them, from a
// multiple of 128 on, share one.
template <int kRows, int kColumns, int kCtasDown, int kCtasAcross, int kPartsOfK,
          bool kScalesByColumn>
struct TileShape {
    static constexpr int kParts = kPartsOfK;
    static constexpr int kTileM = kRows;
    static constexpr int kTileN = kColumns;
    static constexpr int kDown = kCtasDown;
    static constexpr int kAcross = kCtasAcross;
    static constexpr int kCtas = kDown * kAcross;
    static constexpr bool kColumnScales = kScalesByColumn;
    static constexpr int kConsumerM = kTileM / kConsumers;
    static constexpr int kCopiedM = kTileM / kAcross;  // rows of a that a CTA copies
    static constexpr int kCopiedN = kTileN / kDown;    // rows of b
    static constexpr int kABytes = kTileM * kStageK;
    static constexpr int kOperandBytes = kABytes + kTileN * kStageK;
    static constexpr int kScaleTilesOfA = kTileM / kScaleTileRows;
    static constexpr int kScaleTilesOfB = kTileN / kScaleTileRows;
    static constexpr int kScaleBytes = (kScaleTilesOfA + kScaleTilesOfB) * kScaleTileBytes;
    static constexpr int kStageBytes = kOperandBytes + kScaleBytes;
    static constexpr int kStages =
        (kSharedLimit - kAlignment - kStagedBytes - kBarrierBytes) / kStageBytes;

    static_assert(kParts == 1 || kCtas == 1, "CTAs share operands or K");
    static_assert(kTileM % kScaleTileRows == 0 && kTileN % kScaleTileRows == 0,
                  "whole scale tiles");
    static_assert(kCopiedM % 8 == 0 && kCopiedM <= 256, "whole swizzles, and what a box may have");
    static_assert(kCopiedN % 8 == 0 && kCopiedN <= 256, "whole swizzles, and what a box may have");
    static_assert(kStages >= 3 && 2 * kStages * 8 <= kBarrierBytes, "shared memory");
};

// Shared memory from a 1024-byte boundary on, in the same places in all CTAs of a cluster.
template <typename S>
struct Shared {
    uint8* operands;  // [kStages][kTileM + kTileN][128], swizzled
    uint8* scales;    // [kStages][kScaleTilesOfA + kScaleTilesOfB][512]
    uint8* staged;    // [kConsumerWarps][16][128]
    uint64* full;     // [kStages] operands and scales are there
    uint64* empty;    // [kStages] they have been read, by the consumers of all CTAs of the cluster

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        operands = memory + (-address & (kAlignment - 1));
        scales = operands + S::kStages * S::kOperandBytes;
        staged = scales + S::kStages * S::kScaleBytes;
        full = reinterpret_cast<uint64*>(staged + kStagedBytes);
        empty = full + S::kStages;
    }

    // By one thread of each CTA.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(full + i);
            mbarrier_set(empty + i, kConsumerWarps * S::kCtas);
        }
        mbarrier_publish();
    }
};

// A pipeline stage and the phase of its barriers.
template <typename S>
struct Stage {
    uint32 index = 0;
    uint32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == S::kStages) {
            index = 0;
            phase ^= 1;
        }
    }
};

template <typename S>
__device__ __forceinline__ void wait(uint64* barrier, uint32 phase) {
    if constexpr (S::kCtas == 1) {
        mbarrier_wait(barrier, phase);
    } else {
        mbarrier_wait_shared_cluster(barrier, phase);
    }
}

// All threads of all CTAs that share operands.
template <typename S>
__device__ __forceinline__ void synchronize_all() {
    if constexpr (S::kCtas == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// Gives a stage back to the producers of the cluster, by each warp of the consumers.
template <typename S>
__device__ __forceinline__ void release(uint64* empty) {
    const uint32 lane = opaque(threadIdx.x) % 32;
    __syncwarp();
    if constexpr (S::kCtas == 1) {
        if (lane == 0) {
            mbarrier_arrive(empty);
        }
    } else if (lane < S::kCtas) {
        mbarrier_arrive_shared_cluster(cluster_address(mbarrier_address(empty), lane));
    }
}

// A matrix: E4M3 [rows, k] in boxes of a stage, swizzled by 128 bytes, and its scales in boxes
// of a scale tile, as a matrix of 256 columns.
struct Operand {
    const TensorMap& elements;
    const TensorMap& scales;
};

// Tiles of scales from row `row` of them on, and along K at `k_block` * 128.
template <int kTiles>
__device__ __forceinline__ void copy_scale_tiles(uint8* target, const Operand& operand, uint32 row,
                                                 int32 k_block, int32 k_blocks, uint64* full) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const uint32 tile = (row + i) * k_blocks + k_block;
        tensor_copy_2d(target + i * kScaleTileBytes, operand.scales, 0, tile * kScaleBoxes, full);
    }
}

// The rows of an operand from `row` on, of which a CTA copies `kCopied` to all of `kCtas` that
// share them, from its rank's on.
template <int kCopied, int kCtas>
__device__ __forceinline__ void copy_rows(uint8* target, const Operand& operand, uint32 k,
                                          uint32 row, uint32 rank, uint64* full) {
    if constexpr (kCtas == 1) {
        tensor_copy_2d(target, operand.elements, k, row, full);
    } else {
        constexpr uint16 kAll = (1 << kCtas) - 1;
        const uint32 first = rank * kCopied;
        tensor_copy_2d_multicast(target + first * kStageK, operand.elements, k, row + first, full,
                                 kAll);
    }
}

// What a CTA computes: a tile of the result, of rows of both operands from some on, of blocks of
// 128 along K.
struct TileWork {
    TilePlace place;  // the first element of the tile in the result
    uint32 group;     // whose result, where there are several
    uint32 a_row;
    uint32 b_row;
    uint32 a_scale_row;  // in tiles of scales
    uint32 b_scale_row;
    int32 k_begin;  // in blocks
    int32 k_end;
};

// The producer, one thread of each CTA. Operands have `k_blocks` blocks along K in all.
template <typename S, typename Works>
__device__ __forceinline__ void copy_operands(const Shared<S>& shared, const Operand& a,
                                              const Operand& b, Works works, int32 k_blocks) {
    const uint32 rank = S::kCtas == 1 ? 0 : cluster_rank();
    Stage<S> stage;
    for (TileWork work; works.next(work);) {
        for (int32 k_block = work.k_begin; k_block < work.k_end; ++k_block) {
            wait<S>(shared.empty + stage.index, stage.phase ^ 1);
            uint64* full = shared.full + stage.index;
            mbarrier_expect(full, S::kStageBytes);
            const uint32 k = k_block * kStageK;
            uint8* operands = shared.operands + stage.index * S::kOperandBytes;
            copy_rows<S::kCopiedM, S::kAcross>(operands, a, k, work.a_row, rank, full);
            copy_rows<S::kCopiedN, S::kDown>(operands + S::kABytes, b, k, work.b_row, rank, full);
            uint8* scales = shared.scales + stage.index * S::kScaleBytes;
            copy_scale_tiles<S::kScaleTilesOfA>(scales, a, work.a_scale_row, k_block, k_blocks,
                                                full);
            copy_scale_tiles<S::kScaleTilesOfB>(scales + S::kScaleTilesOfA * kScaleTileBytes, b,
                                                work.b_scale_row, k_block, k_blocks, full);
            stage.advance();
        }
    }
}

}  // namespace sm90_mxfp8
