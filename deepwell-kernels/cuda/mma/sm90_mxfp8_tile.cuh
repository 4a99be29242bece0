// Tiles of a GEMM of two MXFP8 matrices on wgmma, both K-major, where 128 elements along K share a
// scale. wgmma knows no scales: each 128 along K is summed by itself and then promoted, multiplied
// by the scales of its row and column and added to the sums in FP32.
//
// A CTA has three warpgroups. One thread of the first, the producer, has boxes of both operands,
// swizzled by 128 bytes, and the tiles of their scales copied into pipeline stages of 128 along K.
// The other two, the consumers, have half of the tile's rows each, in waves of 64, the rows of one
// wgmma. While one promotes, the other's wgmma run: they take turns in issuing them.
//
// CTAs of a cluster have tiles side by side: each copies a part of the rows of a to all of them. A
// stage is then free when the consumers of all have read it. Tiles beyond the result take part as
// others do, on zeros.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "layout/wgmma_descriptor.cuh"
#include "mma/mxfp8_factors.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_count.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"

namespace sm90_mxfp8 {

constexpr int kStageK = 128;  // elements, and bytes of a row: one swizzle
constexpr int kStepK = 32;    // of one wgmma
constexpr int kSteps = kStageK / kStepK;
constexpr int kWaveM = 64;
constexpr int kTileN = 128;
constexpr int kScaleBoxes = 2;  // rows of 256 bytes of a scale tile, as tensor maps see it

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Of a thread. All together are no more than those that a CTA starts with.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int kSharedLimit = 227 * 1024;
constexpr int kAlignment = 1024;
constexpr int kBarrierBytes = 256;
constexpr int kStagedWarpBytes = 16 * 128;  // results of a warp on their way out
constexpr int kStagedBytes = kConsumerWarps * kStagedWarpBytes;

// A tile of 128 columns. `kScalesByColumn`: columns have scales of their own; otherwise 128 of
// them, from a multiple of 128 on, share one.
template <int kWavesOfConsumer, int kCtasAcross, bool kScalesByColumn>
struct TileShape {
    static constexpr int kWaves = kWavesOfConsumer;
    static constexpr int kAcross = kCtasAcross;
    static constexpr bool kColumnScales = kScalesByColumn;
    static constexpr int kConsumerM = kWaves * kWaveM;
    static constexpr int kTileM = kConsumers * kConsumerM;
    static constexpr int kCopiedM = kTileM / kAcross;  // rows of a that a CTA copies
    static constexpr int kABytes = kTileM * kStageK;
    static constexpr int kOperandBytes = kABytes + kTileN * kStageK;
    static constexpr int kScaleTilesOfA = kTileM / kScaleTileRows;
    static constexpr int kScaleBytes = (kScaleTilesOfA + 1) * kScaleTileBytes;
    static constexpr int kStageBytes = kOperandBytes + kScaleBytes;
    static constexpr int kStages =
        (kSharedLimit - kAlignment - kStagedBytes - kBarrierBytes) / kStageBytes;

    static_assert(kTileM % kScaleTileRows == 0 && kTileN == kScaleTileRows, "whole scale tiles");
    static_assert(kCopiedM % 8 == 0 && kCopiedM <= 256, "whole swizzles, and what a box may have");
    static_assert(kStages >= 3 && 2 * kStages * 8 <= kBarrierBytes, "shared memory");
};

// Shared memory from a 1024-byte boundary on, in the same places in all CTAs of a cluster.
template <typename S>
struct Shared {
    uint8* operands;  // [kStages][kTileM + kTileN][128], swizzled
    uint8* scales;    // [kStages][kScaleTilesOfA + 1][512]
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
            mbarrier_set(empty + i, kConsumerWarps * S::kAcross);
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
    if constexpr (S::kAcross == 1) {
        mbarrier_wait(barrier, phase);
    } else {
        mbarrier_wait_cluster(barrier, phase);
    }
}

// All threads of all CTAs of the cluster.
template <typename S>
__device__ __forceinline__ void synchronize_all() {
    if constexpr (S::kAcross == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// A matrix: E4M3 [rows, k] in boxes of a stage, swizzled by 128 bytes, and its scales in boxes
// of a scale tile, as a matrix of 256 columns.
struct Operand {
    const TensorMap& elements;
    const TensorMap& scales;
};

// The tile of scales that begins at `row` and along K at `stage_k` * 128.
__device__ __forceinline__ void copy_scale_tile(uint8* target, const Operand& operand, uint32 row,
                                                int32 k_block, int32 k_blocks, uint64* full) {
    const uint32 tile = row / kScaleTileRows * k_blocks + k_block;
    tensor_copy_2d(target, operand.scales, 0, tile * kScaleBoxes, full);
}

// The producer, one thread of each CTA.
template <typename S, typename Tiles>
__device__ __forceinline__ void copy_operands(const Shared<S>& shared, const Operand& a,
                                              const Operand& b, Tiles tiles, int32 k_blocks) {
    constexpr uint16 kAll = (1 << S::kAcross) - 1;
    const uint32 first_row = S::kAcross == 1 ? 0 : cluster_rank() * S::kCopiedM;
    Stage<S> stage;
    for (TilePlace place; tiles.next(place);) {
        for (int32 k_block = 0; k_block < k_blocks; ++k_block) {
            wait<S>(shared.empty + stage.index, stage.phase ^ 1);
            uint64* full = shared.full + stage.index;
            mbarrier_expect(full, S::kStageBytes);
            const uint32 k = k_block * kStageK;
            uint8* operands = shared.operands + stage.index * S::kOperandBytes;
            uint8* rows = operands + first_row * kStageK;
            if constexpr (S::kAcross == 1) {
                tensor_copy_2d(rows, a.elements, k, place.row, full);
            } else {
                tensor_copy_2d_multicast(rows, a.elements, k, place.row + first_row, full,
                                         kAll);
            }
            tensor_copy_2d(operands + S::kABytes, b.elements, k, place.column, full);
            uint8* scales = shared.scales + stage.index * S::kScaleBytes;
#pragma unroll
            for (int i = 0; i < S::kScaleTilesOfA; ++i) {
                copy_scale_tile(scales + i * kScaleTileBytes, a, place.row + i * kScaleTileRows,
                                k_block, k_blocks, full);
            }
            copy_scale_tile(scales + S::kScaleTilesOfA * kScaleTileBytes, b, place.column, k_block,
                            k_blocks, full);
            stage.advance();
        }
    }
}

// Consumers issue by turns, the first one first.
class Turn {
    static constexpr uint32 kFirstBarrier = 1;
    static constexpr uint32 kBothThreads = kConsumers * kWarpgroup;
    uint32 consumer_;

  public:
    __device__ __forceinline__ explicit Turn(uint32 consumer) : consumer_(consumer) {
        if (consumer_ == 1) {
            pass();
        }
    }

    __device__ __forceinline__ void await() const {
        barrier_sync(kFirstBarrier + consumer_, kBothThreads);
    }

    __device__ __forceinline__ void pass() const {
        barrier_arrive(kFirstBarrier + (consumer_ ^ 1), kBothThreads);
    }

    // What the second one passes last is for nobody else.
    __device__ __forceinline__ void end() const {
        if (consumer_ == 0) {
            await();
        }
    }
};

// Whether a scale lies outside of 2^-63 to 2^63.
__device__ __forceinline__ bool is_wide(uint32 code) {
    return code - (kE8m0One - 63) > 126;
}

// The scales of the results of a thread in a stage. Four neighbors in a scale tile are those of
// 32 elements each; where 128 share one, the first stands for all, as others may lie beyond K.
template <typename S>
class Scales {
    const uint8* columns_;  // the scale tile of b
    uint32 rows_[2];        // of rows lane / 4 and 8 + lane / 4 of the warp's 16
    uint32 column_;         // of all columns, where they share it

  public:
    // `row` is the warp's first within the tile.
    __device__ __forceinline__ Scales(const uint8* scales, uint32 row) {
        const uint32 upper = row + threadIdx.x % 32 / 4;
        const uint8* tile = scales + upper / kScaleTileRows * kScaleTileBytes;
        rows_[0] = tile[scale_row_place(upper % kScaleTileRows)];
        rows_[1] = tile[scale_row_place(upper % kScaleTileRows + 8)];
        columns_ = scales + S::kScaleTilesOfA * kScaleTileBytes;
        column_ = S::kColumnScales ? kE8m0One : *columns_;
    }

    // Whether some scale that the warp needs is wide.
    __device__ __forceinline__ bool any_wide() const {
        bool wide = is_wide(rows_[0]) || is_wide(rows_[1]) || is_wide(column_);
        if constexpr (S::kColumnScales) {
            const uint4 four = quad(threadIdx.x % 32);
            wide = wide || is_wide(four.x & 0xff) || is_wide(four.y & 0xff) ||
                   is_wide(four.z & 0xff) || is_wide(four.w & 0xff);
        }
        return __any_sync(0xffffffff, wide);
    }

    // sums += partial, scaled.
    template <typename Factor>
    __device__ __forceinline__ void promote(float (&sums)[64], const float (&partial)[64]) const {
        const Factor rows[2] = {Factor::of(rows_[0], false), Factor::of(rows_[1], false)};
        if constexpr (S::kColumnScales) {
            const uint32 pair = threadIdx.x % 4 * 2;
#pragma unroll
            for (int eight = 0; eight < 4; ++eight) {
                // Of columns that are 32 apart.
                const uint4 low = quad(eight * 8 + pair);
                const uint4 high = quad(eight * 8 + pair + 1);
                const uint32 scale_bytes[4][2] = {
                    {low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Factor columns[2] = {Factor::of(scale_bytes[i][0] & 0xff, true),
                                               Factor::of(scale_bytes[i][1] & 0xff, true)};
                    add_scaled(sums, partial, i * 4 + eight, rows, columns);
                }
            }
        } else {
            const Factor column = Factor::of(column_, true);
            const Factor columns[2] = {column, column};
#pragma unroll
            for (int eight = 0; eight < kTileN / 8; ++eight) {
                add_scaled(sums, partial, eight, rows, columns);
            }
        }
    }

  private:
    // The scales of columns `column`, 32 + `column`, 64 + `column` and 96 + `column`, in the lowest
    // byte of each word.
    __device__ __forceinline__ uint4 quad(uint32 column) const {
        return *reinterpret_cast<const uint4*>(columns_ + scale_row_place(column));
    }

    // The four values of a thread among eight columns.
    template <typename Factor>
    static __device__ __forceinline__ void add_scaled(float (&sums)[64],
                                                      const float (&partial)[64], int eight,
                                                      const Factor (&rows)[2],
                                                      const Factor (&columns)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& sum = sums[eight * 4 + i];
            sum = Factor::add_scaled(sum, partial[eight * 4 + i], rows[i / 2], columns[i % 2]);
        }
    }
};

// Gives a stage back to the producers of the cluster, by each warp of the consumers.
template <typename S>
__device__ __forceinline__ void release(uint64* empty) {
    const uint32 lane = threadIdx.x % 32;
    __syncwarp();
    if constexpr (S::kAcross == 1) {
        if (lane == 0) {
            mbarrier_arrive(empty);
        }
    } else if (lane < S::kAcross) {
        mbarrier_arrive_cluster(cluster_address(mbarrier_address(empty), lane));
    }
}

// Of a wave that begins `a` bytes into shared memory: the 128 along K of a stage.
__device__ __forceinline__ void multiply_stage(float (&partial)[64], uint32 a, uint32 b) {
    wgmma_fence();
    wgmma_m64n128k32_e4m3<false>(partial, wgmma_swizzled_matrix(a), wgmma_swizzled_matrix(b));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
        wgmma_m64n128k32_e4m3<true>(partial, wgmma_swizzled_matrix(a + step * kStepK),
                                    wgmma_swizzled_matrix(b + step * kStepK));
    }
    wgmma_commit();
}

// A consumer: `store(row, column, sums)` takes the sums of its warp's 16 rows of a wave, the first
// of which is `row` of the result.
template <typename S, typename Tiles, typename Store>
__device__ __forceinline__ void multiply(const Shared<S>& shared, uint32 consumer, Tiles tiles,
                                         int32 k_blocks, Store store) {
    const uint32 first_row = consumer * S::kConsumerM;
    const uint32 warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    const uint32 operands = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    const Turn turn(consumer);
    Stage<S> stage;
    for (TilePlace place; tiles.next(place);) {
        float sums[S::kWaves][64] = {};
        for (int32 k_block = 0; k_block < k_blocks; ++k_block) {
            wait<S>(shared.full + stage.index, stage.phase);
            const uint32 a = operands + stage.index * S::kOperandBytes;
            const uint8* stage_scales = shared.scales + stage.index * S::kScaleBytes;
#pragma unroll
            for (int wave = 0; wave < S::kWaves; ++wave) {
                const uint32 row = first_row + wave * kWaveM;
                float partial[64];
                turn.await();
                // redundant wgmma.fence: the first wave's is behind all reads of these sums
                multiply_stage(partial, a + row * kStageK, a + S::kABytes);
                turn.pass();
                const Scales<S> scales(stage_scales, row + warp_row);
                const bool any_wide = scales.any_wide();
                wgmma_wait(partial);
                const bool is_last = wave + 1 == S::kWaves;
                if (is_last && !S::kColumnScales) {
                    release<S>(shared.empty + stage.index);
                }
                if (any_wide) {
                    scales.template promote<mxfp8_tile::WideFactor>(sums[wave], partial);
                } else {
                    scales.template promote<mxfp8_tile::NarrowFactor>(sums[wave], partial);
                }
                if (is_last && S::kColumnScales) {
                    release<S>(shared.empty + stage.index);
                }
            }
            stage.advance();
        }
#pragma unroll
        for (int wave = 0; wave < S::kWaves; ++wave) {
            store(place.row + first_row + wave * kWaveM + warp_row, place.column, sums[wave]);
        }
    }
    // redundant bar.sync: nobody waits behind the last turn; the barrier is left as it was found
    turn.end();
}

}  // namespace sm90_mxfp8
