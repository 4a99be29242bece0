// Tiles of a BF16 GEMM on tcgen05. Each operand is K-major or MN-major; tensor cores read both, so
// no transpose is needed. See mma/sm100_tile.cuh for the warp roles and pipelines.
//
// A stage has 64 elements along K. A K-major operand is stored as contiguous rows of 128 bytes, an
// MN-major operand as boxes of 64 rows, each with 64 lines of 128 bytes along K.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_tile.cuh"

namespace sm100_bf16 {

using namespace sm100;

constexpr int kBlockK = kStageRowBytes / sizeof(bf16);
constexpr int kBoxRows = 64;  // of an MN-major operand
static_assert(kTransposedBoxBytes == kBoxRows * kStageRowBytes, "a box is as large either way");

// Each operand is K-major or MN-major.
template <int kCtas, int kTileN, int kDown, int kAcross, bool kAStoredKMajor,
          bool kBStoredKMajor>
struct Shape : TileShape<kCtas, kTileN, 0, 0, kDown, kAcross> {
    static constexpr bool kAKMajor = kAStoredKMajor;
    static constexpr bool kBKMajor = kBStoredKMajor;
};

// Copies the calling CTA's share of `kRows` rows of an operand, from `row` on, and of a stage's K,
// to all CTAs that share the rows.
template <typename S, bool kKMajor, int kRows, int kSharers>
__device__ __forceinline__ void copy_operand(uint8* target, const TensorMap& map, uint32 row,
                                             uint32 k, uint32 barrier,
                                             const Sharers& sharers) {
    constexpr int kCopied = kRows / kSharers;
    static_assert(kCopied % kBoxRows == 0, "whole boxes");
    target += sharers.index * (kCopied * kStageRowBytes);
    row += sharers.index * kCopied;
    if constexpr (kKMajor) {
        copy_box<S, kSharers>(target, map, k, row, barrier, sharers);
    } else {
#pragma unroll
        for (int i = 0; i < kCopied / kBoxRows; ++i) {
            copy_box<S, kSharers>(target + i * kTransposedBoxBytes, map, row + i * kBoxRows,
                                  k, barrier, sharers);
        }
    }
}

// Copies both operands, by one thread of each CTA.
template <typename S, typename Tiles>
__device__ __forceinline__ void copy_elements(const Shared<S>& shared, const TensorMap& a,
                                              const TensorMap& b, Tiles tiles, int32 k_blocks) {
    const uint32 rank = rank_in_pair<S>();
    const Sharers of_a = sharers_of_a<S>();
    const Sharers of_b = sharers_of_b<S>();
    copy_operands(shared, tiles, k_blocks,
                  [&](const TilePlace& place, int32 k_block, uint32 stage, uint32 barrier) {
                      uint8* target = shared.operands + stage * S::kOperandBytes;
                      const uint32 k = k_block * kBlockK;
                      copy_operand<S, S::kAKMajor, kBlockM, S::kAcross>(
                          target, a, place.row + rank * kBlockM, k, barrier, of_a);
                      copy_operand<S, S::kBKMajor, S::kBlockN, S::kDown>(
                          target + S::kABytes, b, place.column + rank * S::kBlockN, k,
                          barrier, of_b);
                  });
}

// Descriptor of the operand at `address`, from step `step` of a stage on.
template <bool kKMajor>
__device__ __forceinline__ uint64 operand_at(uint32 address, int step) {
    if constexpr (kKMajor) {
        return tcgen05_swizzled_matrix(address + step * kStepBytes);
    } else {
        return tcgen05_transposed_matrix(address + step * (kStepBytes / 2) * kStageRowBytes);
    }
}

// Issues the MMAs, by one thread (of the first CTA of a pair).
template <typename S, typename Tiles>
__device__ __forceinline__ void multiply_elements(const Shared<S>& shared, uint32 tensor_base,
                                                  Tiles tiles, int32 k_blocks) {
    constexpr uint32 kInstruction =
        tcgen05_bf16_instruction(S::kTileM, S::kTileN, S::kAKMajor, S::kBKMajor);
    const uint32 operands = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    multiply(shared, tensor_base, tiles, k_blocks,
             [&](uint32 target, const TilePlace&, int32 k_block, uint32 stage) {
        const uint32 a = operands + stage * S::kOperandBytes;
        const uint32 b = a + S::kABytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            // redundant leading offset of A, leading offset of B: none K-major, nor of 64 columns
            tcgen05_multiply_f16<S::kCtas>(target, operand_at<S::kAKMajor>(a, step),
                                             operand_at<S::kBKMajor>(b, step), kInstruction,
                                             k_block > 0 || step > 0);
        }
    });
}

}  // namespace sm100_bf16
