// Consumers that take turns: half of the tile's rows each, in waves of 64, the rows of one wgmma
// whose operands both lie in shared memory. One passes the turn when half of a wave is done.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/wgmma_descriptor.cuh"
#include "mma/mxfp8_factors.cuh"
#include "mma/sm90_mxfp8_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"

namespace sm90_mxfp8_turns {

using namespace sm90_mxfp8;
constexpr int kWaveM = 64;
constexpr int kTileN = 128;

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

// The first half of a wave is done.
__device__ __forceinline__ void wgmma_wait_half() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Of a wave that begins `a` bytes into shared memory: the 128 along K of a stage.
__device__ __forceinline__ void multiply_stage(float (&partial)[64], uint32 a, uint32 b) {
    wgmma_fence();
    wgmma_m64n128k32_e4m3<false>(partial, wgmma_swizzled_matrix(a), wgmma_swizzled_matrix(b));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
        if (step == kSteps / 2) {
            wgmma_commit();
        }
        wgmma_m64n128k32_e4m3<true>(partial, wgmma_swizzled_matrix(a + step * kStepK),
                                    wgmma_swizzled_matrix(b + step * kStepK));
    }
    wgmma_commit();
}

// A consumer: `store(row, column, sums)` takes the sums of its warp's 16 rows of a wave, the first
// of which is `row` of the result.
template <typename S, typename Works, typename Store>
__device__ __forceinline__ void multiply(const Shared<S>& shared, uint32 consumer, Works works,
                                         Store store) {
    const uint32 first_row = consumer * S::kConsumerM;
    const uint32 warp_row = threadIdx.x % kWarpgroup / 32 * 16;
    const uint32 operands = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    const Turn turn(consumer);
    Stage<S> stage;
    for (TileWork work; works.next(work);) {
        float sums[(S::kConsumerM / kWaveM)][64] = {};
        for (int32 k_block = work.k_begin; k_block < work.k_end; ++k_block) {
            wait<S>(shared.full + stage.index, stage.phase);
            const uint32 a = operands + stage.index * S::kOperandBytes;
            const uint8* stage_scales = shared.scales + stage.index * S::kScaleBytes;
#pragma unroll
            for (int wave = 0; wave < (S::kConsumerM / kWaveM); ++wave) {
                const uint32 row = first_row + wave * kWaveM;
                float partial[64];
                turn.await();
                // redundant wgmma.fence: the first wave's is behind all reads of these sums
                multiply_stage(partial, a + row * kStageK, a + S::kABytes);
                wgmma_wait_half();
                turn.pass();
                const Scales<S> scales(stage_scales, row + warp_row);
                const bool any_wide = scales.any_wide();
                wgmma_wait(partial);
                const bool is_last = wave + 1 == (S::kConsumerM / kWaveM);
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
        for (int wave = 0; wave < (S::kConsumerM / kWaveM); ++wave) {
            store(work.place.row + first_row + wave * kWaveM + warp_row, work.place.column,
                  sums[wave]);
        }
    }
    // redundant bar.sync: nobody waits behind the last turn; the barrier is left as it was found
    turn.end();
}

}  // namespace sm90_mxfp8_turns
