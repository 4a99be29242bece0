// Tiles of a GEMM of block-scaled operands on tcgen05, both operands K-major, with data and scales.
// See mma/sm100_tile.cuh for the warp roles and pipelines.
//
// Scales are stored in the 512-byte tiles that tcgen05.cp takes (layout/scale_tile.cuh) and are
// copied with the data. Scale copies to tensor memory and MMAs of one thread execute in issue
// order, so a single buffer in tensor memory serves all stages.
//
// A format has these members:
//   kStageK       elements of a row in a stage;
//   kScaleSteps   scale tiles along K in a stage;
//   copy_scales   copies the scales of a stage to shared memory;
//   multiply      one MMA, step `step` of a stage, with the scales of the stage in tensor memory.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_tile.cuh"

namespace sm100_scaled {

using namespace sm100;

constexpr int kScaleTileColumns = 4;  // in tensor memory

// Scale tiles of 128 rows: a CTA's rows of a, and all `columns` columns of b.
constexpr int scale_tiles(int columns) {
    return 1 + columns / kScaleTileRows;
}

template <typename OperandFormat, int kCtas, int kTileN, int kDown = 1, int kAcross = 1>
struct ScaledShape
    : TileShape<kCtas, kTileN,
                OperandFormat::kScaleSteps * scale_tiles(kTileN) * kScaleTileBytes,
                OperandFormat::kScaleSteps * scale_tiles(kTileN) * kScaleTileColumns, kDown,
                kAcross> {
    using Format = OperandFormat;
    static constexpr int kScaleSteps = Format::kScaleSteps;
    static constexpr int kScaleTiles = scale_tiles(kTileN);  // a step
    static constexpr int kARowBytes = kScaleSteps * kScaleTileBytes;   // scales of a in a stage
    static constexpr int kAColumns = kScaleSteps * kScaleTileColumns;  // in tensor memory
    static_assert(kTileN % kScaleTileRows == 0, "whole scale tiles");
};

// A matrix: data [rows, k] in boxes of a stage, 128-byte swizzle, and scales as the format says.
struct Operand {
    const TensorMap& data;
    const TensorMap& scales;
    int32 rows;
};

// Copies the calling CTA's share of `kRows` rows of data, from `row` on, and of a stage's K, to all
// CTAs that share the rows.
template <typename S, int kRows, int kSharers>
__device__ __forceinline__ void copy_rows(uint8* target, const TensorMap& data, uint32 row,
                                          uint32 k, uint32 barrier, const Sharers& sharers) {
    constexpr int kCopied = kRows / kSharers;
    const uint32 first = sharers.index * kCopied;
    copy_box<S, kSharers>(target + first * kStageRowBytes, data, k, row + first, barrier,
                          sharers);
}

// Copies data and scales of both operands, by one thread of each CTA. Both CTAs of a pair need the
// scales of all of b. Scales are not multicast: they are a thirty-second of the data, or an eighth.
template <typename S, typename Tiles>
__device__ __forceinline__ void copy_quantized(const Shared<S>& shared, const Operand& a,
                                           const Operand& b, Tiles tiles, int32 k_blocks) {
    const uint32 rank = rank_in_pair<S>();
    const Sharers of_a = sharers_of_a<S>();
    const Sharers of_b = sharers_of_b<S>();
    copy_operands(shared, tiles, k_blocks,
                  [&](const TilePlace& place, int32 k_block, uint32 stage, uint32 barrier) {
                      const uint32 k = k_block * kStageRowBytes;
                      const uint32 row = place.row + rank * kBlockM;
                      uint8* data = shared.operands + stage * S::kOperandBytes;
                      copy_rows<S, kBlockM, S::kAcross>(data, a.data, row, k, barrier, of_a);
                      copy_rows<S, S::kBlockN, S::kDown>(data + S::kABytes, b.data,
                                                         place.column + rank * S::kBlockN, k,
                                                         barrier, of_b);
                      uint8* scales = shared.side + stage * S::kSideBytes;
                      S::Format::template copy_scales<S, 1>(scales, a.scales, row, k_block,
                                                            k_blocks, barrier, of_a);
                      S::Format::template copy_scales<S, S::kScaleTiles - 1>(
                          scales + S::kARowBytes, b.scales, place.column, k_block, k_blocks,
                          barrier, of_b);
                  });
}

// Copies the scales of 128 * `kTiles` rows and a stage from shared memory at `source`, row tile
// after row tile, to tensor memory at `target`, step after step.
template <typename S, int kTiles>
__device__ __forceinline__ void scales_to_columns(uint32 target, uint32 source) {
#pragma unroll
    for (int step = 0; step < S::kScaleSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            // redundant leading offset of tcgen05.cp: rows of 16 bytes have no neighbor along K
            tcgen05_copy_to_all_warps<S::kCtas>(
                target + (step * kTiles + i) * kScaleTileColumns,
                tcgen05_scale_tile(source + (i * S::kScaleSteps + step) * kScaleTileBytes));
        }
    }
}

// Copies the scales of a stage from shared memory at `source` to tensor memory: those of a, then
// those of b.
template <typename S>
__device__ __forceinline__ void scales_to_tensor_memory(uint32 target, uint32 source) {
    scales_to_columns<S, 1>(target, source);
    scales_to_columns<S, S::kScaleTiles - 1>(target + S::kAColumns, source + S::kARowBytes);
}

// One MMA of a stage with scales at `scales` of tensor memory.
template <typename S>
__device__ __forceinline__ void multiply_step(uint32 target, uint32 a_data, uint32 b_data,
                                              uint32 scales, int step, bool accumulate) {
    // redundant leading offset of A, leading offset of B: unused in swizzled K-major rows
    S::Format::template multiply<S>(target, tcgen05_swizzled_matrix(a_data + step * kStepBytes),
                                    tcgen05_swizzled_matrix(b_data + step * kStepBytes), scales,
                                    scales + S::kAColumns, step, accumulate);
}

// Issues the MMAs, by one thread (of the first CTA of a pair). Scales follow the accumulators in
// tensor memory.
template <typename S, typename Tiles>
__device__ __forceinline__ void multiply_quantized(const Shared<S>& shared, uint32 tensor_base,
                                               Tiles tiles, int32 k_blocks) {
    const uint32 in_tensor = tensor_base + S::kFirstSideColumn;
    const uint32 data = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    const uint32 scales = static_cast<uint32>(__cvta_generic_to_shared(shared.side));
    multiply(shared, tensor_base, tiles, k_blocks,
             [&](uint32 target, const TilePlace&, int32 k_block, uint32 stage) {
        scales_to_tensor_memory<S>(in_tensor, scales + stage * S::kSideBytes);
        const uint32 a_data = data + stage * S::kOperandBytes;
        const uint32 b_data = a_data + S::kABytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            multiply_step<S>(target, a_data, b_data, in_tensor, step, k_block > 0 || step > 0);
        }
    });
}

}  // namespace sm100_scaled
