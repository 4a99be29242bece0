// Consumers of the pipeline of sm90_mxfp8_pipeline.cuh. wgmma knows no scales: each 128 along K is
// summed by itself and then promoted, multiplied by the scales of its row and column and added to
// the sums in FP32.
//
// Each consumer has 64 rows of the tile, whose elements of a stage it holds in registers, and goes
// over the columns in slices of 64. Two slices have registers for what is not promoted yet: while
// one is, the wgmma of the next run, of the next stage behind the last. That reads from shared
// memory a once and b, where wgmma that has both there reads more than an SM can.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/wgmma_descriptor.cuh"
#include "mma/mxfp8_factors.cuh"
#include "mma/sm90_mxfp8_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"

namespace sm90_mxfp8 {

constexpr int kConsumerRows = 64;
constexpr uint32 kSkewBarrier = 2;
constexpr int kSliceN = 64;
constexpr int kSliceValues = kSliceN / 2;  // of a thread
constexpr uint32 kSliceBytes = kSliceN * kStageK;

// Of a thread: rows lane / 4 and 8 + lane / 4 of its warp's 16, as wgmma takes them.
using Fragments = uint32[kSteps][4];

// `rows` is the address of the warp's 16 rows in a stage.
__device__ __forceinline__ void load_fragments(Fragments& fragments, uint32 rows) {
    const uint32 lane = threadIdx.x % 32;
    // Of a row, 16-byte units are exchanged by its number modulo eight.
    const uint32 unit = lane / 16 ^ lane % 8;
    const uint32 first = lane % 16 * kStageK + unit * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        ldmatrix_x4(fragments[step], rows + (first ^ step * kStepK));
    }
}

// The 128 along K of a stage, for the slice of b that begins at `b`.
__device__ __forceinline__ void multiply_slice(float (&partial)[kSliceValues],
                                               const Fragments& fragments, uint64 b) {
    wgmma_fence();
    wgmma_m64n64k32_e4m3<false>(partial, fragments[0], b);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
        wgmma_m64n64k32_e4m3<true>(partial, fragments[step], wgmma_deeper(b, step * kStepK));
    }
    wgmma_commit();
}

// Whether a scale lies outside of 2^-63 to 2^63.
__device__ __forceinline__ bool is_wide(uint32 code) {
    return code - (kE8m0One - 63) > 126;
}

// A column's scale, the lowest byte of `word`, as a factor. What a narrow one has of the next byte
// is a sign.
__device__ __forceinline__ mxfp8_tile::NarrowFactor of_column(uint32 word,
                                                              mxfp8_tile::NarrowFactor) {
    return {fabsf(__uint_as_float(word << 23))};
}

__device__ __forceinline__ mxfp8_tile::WideFactor of_column(uint32 word, mxfp8_tile::WideFactor) {
    return mxfp8_tile::WideFactor::of(word & 0xff, true);
}

// The scales of the results of a thread in a stage. Four neighbors in a scale tile are those of
// 32 elements each; where 128 share one, the first stands for all, as others may lie beyond K.
template <typename S>
class Scales {
    const uint8* columns_;  // the scale tiles of b
    uint32 rows_[2];        // of rows lane / 4 and 8 + lane / 4 of the warp's 16
    uint32 squares_[S::kScaleTilesOfB];  // of 128 columns each, where they share one
    bool any_wide_;                      // of those that the warp needs

  public:
    // `row` is the warp's first within the tile.
    __device__ __forceinline__ Scales(const uint8* scales, uint32 row) {
        const uint32 lane = threadIdx.x % 32;
        const uint32 upper = row + lane / 4;
        rows_[0] = scales[scale_row_place(upper)];
        rows_[1] = scales[scale_row_place(upper + 8)];
        columns_ = scales + S::kScaleTilesOfA * kScaleTileBytes;
        bool wide = is_wide(rows_[0]) || is_wide(rows_[1]);
        if constexpr (S::kColumnScales) {
            // Up to 2^64, whose products with rows' are FP32 still: one of the two upper bits.
            uint32 narrow = 0x80;
#pragma unroll
            for (int i = 0; i < S::kScaleTilesOfB; ++i) {
                const uint4 four = *reinterpret_cast<const uint4*>(
                    columns_ + i * kScaleTileBytes + scale_row_place(lane));
                narrow &= (four.x ^ four.x << 1) & (four.y ^ four.y << 1);
                narrow &= (four.z ^ four.z << 1) & (four.w ^ four.w << 1);
            }
            wide = wide || narrow == 0;
        } else {
#pragma unroll
            for (int i = 0; i < S::kScaleTilesOfB; ++i) {
                squares_[i] = columns_[i * kScaleTileBytes];
                wide = wide || is_wide(squares_[i]);
            }
        }
        any_wide_ = __any_sync(0xffffffff, wide);
    }

    // sums += partial, scaled, of a slice.
    __device__ __forceinline__ void promote(float (&sums)[kSliceValues],
                                            const float (&partial)[kSliceValues],
                                            int slice) const {
        if (any_wide_) {
            promote_by<mxfp8_tile::WideFactor>(sums, partial, slice);
        } else {
            promote_by<mxfp8_tile::NarrowFactor>(sums, partial, slice);
        }
    }

  private:
    template <typename Factor>
    __device__ __forceinline__ void promote_by(float (&sums)[kSliceValues],
                                               const float (&partial)[kSliceValues],
                                               int slice) const {
        const Factor rows[2] = {Factor::of(rows_[0], false), Factor::of(rows_[1], false)};
        if constexpr (S::kColumnScales) {
            const uint8* scales = columns_ + slice / 2 * kScaleTileBytes + slice % 2 * 8;
            const uint32 pair = threadIdx.x % 4 * 2;
#pragma unroll
            for (int eight = 0; eight < 4; ++eight) {
                // Each of a column and of the one that is 32 further.
                const uint32 at = scale_row_place(eight * 8 + pair);
                const uint2 low = *reinterpret_cast<const uint2*>(scales + at);
                const uint2 high =
                    *reinterpret_cast<const uint2*>(scales + at + scale_row_place(1));
                const Factor near[2] = {of_column(low.x, Factor{}), of_column(high.x, Factor{})};
                const Factor far[2] = {of_column(low.y, Factor{}), of_column(high.y, Factor{})};
                add_scaled(sums, partial, eight, rows, near);
                add_scaled(sums, partial, eight + 4, rows, far);
            }
        } else {
            const Factor column = Factor::of(squares_[slice / 2], true);
            const Factor columns[2] = {column, column};
#pragma unroll
            for (int eight = 0; eight < kSliceN / 8; ++eight) {
                add_scaled(sums, partial, eight, rows, columns);
            }
        }
    }

    // The four values of a thread among eight columns.
    template <typename Factor>
    static __device__ __forceinline__ void add_scaled(float (&sums)[kSliceValues],
                                                      const float (&partial)[kSliceValues],
                                                      int eight, const Factor (&rows)[2],
                                                      const Factor (&columns)[2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& sum = sums[eight * 4 + i];
            sum = Factor::add_scaled(sum, partial[eight * 4 + i], rows[i / 2], columns[i % 2]);
        }
    }
};

// The sums of a thread: slices of a tile.
template <typename S>
using Sums = float[S::kTileN / kSliceN][kSliceValues];

// The row of the tile with which the 16 of the calling warp begin.
__device__ __forceinline__ uint32 first_row_of_warp(uint32 consumer) {
    return consumer * kConsumerRows + threadIdx.x % kWarpgroup / 32 * 16;
}

// A consumer: `store(work, sums)` takes the sums of its warp's 16 rows of a tile.
template <typename S, typename Works, typename Store>
__device__ __forceinline__ void multiply(const Shared<S>& shared, uint32 consumer, Works works,
                                         Store store) {
    constexpr int kSlices = S::kTileN / kSliceN;
    constexpr int kLast = kSlices - 1;
    static_assert(S::kTileM == kConsumers * kConsumerRows, "64 rows for each consumer");
    const uint32 row = first_row_of_warp(consumer);
    const uint32 operands = shared_address(shared.operands);
    Stage<S> stage;
    for (TileWork work; works.next(work);) {
        Sums<S> sums = {};
        if (Works::kMayBeEmpty && work.k_begin == work.k_end) {
            store(work, sums);
            continue;
        }
        // In a tile of that many stages, the first consumer is not a tile ahead of the other.
        const bool is_skewed = work.k_end - work.k_begin >= S::kStages;
        if (is_skewed && consumer == 1) {
            barrier_sync(kSkewBarrier, kConsumers * kWarpgroup);
        }
        // The compiler waits where registers of wgmma that run would stay in use around the loop: a
        // stage begins and ends with none.
#pragma unroll 1
        for (int32 k_block = work.k_begin; k_block < work.k_end; ++k_block) {
            wait<S>(shared.full + stage.index, stage.phase);
            const uint32 first = operands + stage.index * S::kOperandBytes;
            const uint64 b = wgmma_swizzled_matrix(first + S::kABytes);
            Fragments fragments;
            float partial[2][kSliceValues];
            load_fragments(fragments, first + row * kStageK);
            multiply_slice(partial[0], fragments, b);
            const Scales<S> scales(shared.scales + stage.index * S::kScaleBytes, row);
#pragma unroll
            for (int slice = 1; slice < kSlices; ++slice) {
                multiply_slice(partial[slice % 2], fragments,
                               wgmma_deeper(b, slice * kSliceBytes));
                if (slice == kSlices / 2 && is_skewed && consumer == 0 &&
                    k_block == work.k_begin) {
                    barrier_arrive(kSkewBarrier, kConsumers * kWarpgroup);
                }
                wgmma_wait_for<1>(partial[(slice - 1) % 2]);
                scales.promote(sums[slice - 1], partial[(slice - 1) % 2], slice - 1);
            }
            wgmma_wait_for<0>(partial[kLast % 2]);
            if constexpr (!S::kColumnScales) {
                release<S>(shared.empty + stage.index);
            }
            scales.promote(sums[kLast], partial[kLast % 2], kLast);
            if constexpr (S::kColumnScales) {
                release<S>(shared.empty + stage.index);
            }
            stage.advance();
        }
        work.place = works.place();
        store(work, sums);
    }
}

}  // namespace sm90_mxfp8
