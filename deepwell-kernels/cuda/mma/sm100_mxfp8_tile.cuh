// Tiles of an MXFP8 GEMM on tcgen05, both operands K-major, with data and scales. See
// mma/sm100_tile.cuh for the warp roles and pipelines.
//
// Scales are stored in the 512-byte tiles that tcgen05.cp takes (layout/scale_tile.cuh) and are
// copied with the data. Scale copies to tensor memory and MMAs of one thread execute in issue
// order, so a single buffer in tensor memory serves all stages.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_tile.cuh"

namespace sm100_mxfp8 {

using namespace sm100;

constexpr int kScaleTileColumns = 4;  // in tensor memory
constexpr int kScaleBoxes = 2;        // rows of 256 bytes of a scale tile, as in tensor maps

// Scale tiles of a CTA's rows of a and of all `columns` columns of b.
constexpr int scale_tiles(int columns) {
    return 1 + columns / kScaleTileRows;
}

template <int kCtas, int kTileN, int kDown = 1, int kAcross = 1>
struct Shape : TileShape<kCtas, kTileN, scale_tiles(kTileN) * kScaleTileBytes,
                         scale_tiles(kTileN) * kScaleTileColumns, kDown, kAcross> {
    static constexpr int kScaleTiles = scale_tiles(kTileN);
    static_assert(kTileN % kScaleTileRows == 0, "whole scale tiles");
};

// A matrix: data [rows, k] in boxes of a stage, 128-byte swizzle, and scales in boxes of a scale
// tile, as a matrix of 256 columns.
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

// Copies the scale tiles of `kTiles` * 128 rows, from `row` on, and one K-block.
template <typename S, int kTiles>
__device__ __forceinline__ void copy_scales(uint8* target, const TensorMap& scales, uint32 row,
                                            int32 k_block, int32 k_blocks, uint32 barrier,
                                            const Sharers& sharers) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
        const uint32 tile = (row / kScaleTileRows + i) * k_blocks + k_block;
        copy_box<S, 1>(target + i * kScaleTileBytes, scales, 0, tile * kScaleBoxes, barrier,
                       sharers);
    }
}

// Copies data and scales of both operands, by one thread of each CTA. Both CTAs of a pair need the
// scales of all of b. Scales are not multicast: they are a thirty-second of the data.
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
                      copy_scales<S, 1>(scales, a.scales, row, k_block, k_blocks, barrier, of_a);
                      copy_scales<S, S::kScaleTiles - 1>(scales + kScaleTileBytes, b.scales,
                                                         place.column, k_block, k_blocks, barrier,
                                                         of_b);
                  });
}

// Copies the scales of a stage from shared memory at `source` to tensor memory.
template <typename S>
__device__ __forceinline__ void scales_to_tensor_memory(uint32 target, uint32 source) {
#pragma unroll
    for (int i = 0; i < S::kScaleTiles; ++i) {
        // redundant leading offset of tcgen05.cp: rows of 16 bytes have no neighbor along K
        tcgen05_copy_to_all_warps<S::kCtas>(target + i * kScaleTileColumns,
                                            tcgen05_scale_tile(source + i * kScaleTileBytes));
    }
}

// Issues the MMAs, by one thread (of the first CTA of a pair). Scales follow the accumulators in
// tensor memory.
template <typename S, typename Tiles>
__device__ __forceinline__ void multiply_quantized(const Shared<S>& shared, uint32 tensor_base,
                                               Tiles tiles, int32 k_blocks) {
    const uint32 a_scales = tensor_base + S::kFirstSideColumn;
    const uint32 b_scales = a_scales + kScaleTileColumns;
    const uint32 data = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    const uint32 scales = static_cast<uint32>(__cvta_generic_to_shared(shared.side));
    multiply(shared, tensor_base, tiles, k_blocks,
             [&](uint32 target, const TilePlace&, int32 k_block, uint32 stage) {
        scales_to_tensor_memory<S>(a_scales, scales + stage * S::kSideBytes);
        const uint32 a_data = data + stage * S::kOperandBytes;
        const uint32 b_data = a_data + S::kABytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            // redundant leading offset of A, leading offset of B: unused in swizzled K-major rows
            tcgen05_multiply_mxf8<S::kCtas>(
                target, tcgen05_swizzled_matrix(a_data + step * kStepBytes),
                tcgen05_swizzled_matrix(b_data + step * kStepBytes),
                tcgen05_mxf8_instruction(S::kTileM, S::kTileN, step), a_scales, b_scales,
                k_block > 0 || step > 0);
        }
    });
}

}  // namespace sm100_mxfp8
