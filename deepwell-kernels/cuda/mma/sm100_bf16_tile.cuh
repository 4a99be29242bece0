// Tiles of a BF16 GEMM on tcgen05, each operand stored by depth or by rows: tensor cores read both
// ways, so that nothing is transposed. See mma/sm100_tile.cuh for the frame.
//
// A stage has 64 elements of depth. Of an operand stored by depth, rows of 128 bytes lie one after
// the other; of one stored by rows, boxes of 64 rows, each with 64 lines of 128 bytes in depth.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_tile.cuh"

namespace sm100_bf16 {

using namespace sm100;

constexpr int kBlockK = kDepthBytes / sizeof(bf16);
constexpr int kBoxRows = 64;  // of an operand stored by rows
static_assert(kTransposedBoxBytes == kBoxRows * kDepthBytes, "a box is as large either way");

// Each operand is stored by depth or by rows.
template <int kBlocks, int kTileN, int kDown, int kAcross, bool kAStoredByDepth,
          bool kBStoredByDepth>
struct Shape : TileShape<kBlocks, kTileN, 0, 0, kDown, kAcross> {
    static constexpr bool kAByDepth = kAStoredByDepth;
    static constexpr bool kBByDepth = kBStoredByDepth;
};

// Of `kRows` rows of an operand from `row` on, and a stage's depth, what the calling block copies
// for all that share them.
template <typename S, bool kByDepth, int kRows, int kSharers>
__device__ __forceinline__ void copy_operand(uint8* target, const TensorMap& map, uint32 row,
                                             uint32 depth, uint32 barrier,
                                             const Sharers& sharers) {
    constexpr int kCopied = kRows / kSharers;
    static_assert(kCopied % kBoxRows == 0, "whole boxes");
    target += sharers.index * (kCopied * kDepthBytes);
    row += sharers.index * kCopied;
    if constexpr (kByDepth) {
        copy_box<S, kSharers>(target, map, depth, row, barrier, sharers);
    } else {
#pragma unroll
        for (int i = 0; i < kCopied / kBoxRows; ++i) {
            copy_box<S, kSharers>(target + i * kTransposedBoxBytes, map, row + i * kBoxRows,
                                  depth, barrier, sharers);
        }
    }
}

// Both operands, by one thread of each block.
template <typename S, typename Tiles>
__device__ __forceinline__ void copy_elements(const Shared<S>& shared, const TensorMap& a,
                                              const TensorMap& b, Tiles tiles, int32 pieces) {
    const uint32 rank = rank_in_pair<S>();
    const Sharers of_a = sharers_of_a<S>();
    const Sharers of_b = sharers_of_b<S>();
    copy_operands(shared, tiles, pieces,
                  [&](const TilePlace& place, int32 piece, uint32 stage, uint32 barrier) {
                      uint8* target = shared.operands + stage * S::kOperandBytes;
                      const uint32 depth = piece * kBlockK;
                      copy_operand<S, S::kAByDepth, kBlockM, S::kAcross>(
                          target, a, place.row + rank * kBlockM, depth, barrier, of_a);
                      copy_operand<S, S::kBByDepth, S::kBlockN, S::kDown>(
                          target + S::kABytes, b, place.column + rank * S::kBlockN, depth,
                          barrier, of_b);
                  });
}

// The operand at `address`, from the depth of `step` of a stage on.
template <bool kByDepth>
__device__ __forceinline__ uint64 operand_at(uint32 address, int step) {
    if constexpr (kByDepth) {
        return tcgen05_swizzled_matrix(address + step * kStepBytes);
    } else {
        return tcgen05_transposed_matrix(address + step * (kStepBytes / 2) * kDepthBytes);
    }
}

// The MMAs, by one thread (of the first block of a pair).
template <typename S, typename Tiles>
__device__ __forceinline__ void multiply_elements(const Shared<S>& shared, uint32 tensor_base,
                                                  Tiles tiles, int32 pieces) {
    constexpr uint32 kInstruction =
        tcgen05_bf16_instruction(S::kTileM, S::kTileN, S::kAByDepth, S::kBByDepth);
    const uint32 operands = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    multiply(shared, tensor_base, tiles, pieces, [&](uint32 target, int32 piece, uint32 stage) {
        const uint32 a = operands + stage * S::kOperandBytes;
        const uint32 b = a + S::kABytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            // redundant leading offset of A, leading offset of B: none by depth, nor of 64 columns
            tcgen05_multiply_f16<S::kBlocks>(target, operand_at<S::kAByDepth>(a, step),
                                             operand_at<S::kBByDepth>(b, step), kInstruction,
                                             piece > 0 || step > 0);
        }
    });
}

}  // namespace sm100_bf16
