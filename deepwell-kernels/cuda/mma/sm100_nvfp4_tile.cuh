// NVFP4 operands of a GEMM on tcgen05: E2M1 elements, two to a byte, with a UE4M3 scale per 16
// along K. See mma/sm100_scaled_tile.cuh.
//
// A scale tile has the scales of one MMA's 64 elements, so a stage has four along K.
#pragma once

#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_scaled_tile.cuh"
#include "ptx/tensor_copy_3d.cuh"

namespace sm100_nvfp4 {

using namespace sm100_scaled;

// Tensor maps of scales have three dimensions: 256 bytes, half tiles along K, and tiles of 128
// rows. A box has the tiles of a stage, for all rows that are copied. Tiles beyond K are zeros: the
// tiles of the next rows may have NaN, which zeros of the data would not cancel.
struct Nvfp4 {
    static constexpr int kStageK = 2 * kStageRowBytes;
    static constexpr int kScaleSteps = kSteps;
    static constexpr int kHalves = 2;  // halves of a scale tile

    // Copies the scale tiles of `kTiles` * 128 rows, from `row` on, and one K-block.
    template <typename S, int kTiles>
    static __device__ __forceinline__ void copy_scales(uint8* target, const TensorMap& scales,
                                                       uint32 row, int32 k_block, int32,
                                                       uint32 barrier, const Sharers&) {
        tensor_copy_3d<S::kCtas>(target, scales, 0, k_block * (kScaleSteps * kHalves),
                                 row / kScaleTileRows, barrier);
    }

    // Each step has its own columns of tensor memory.
    template <typename S>
    static __device__ __forceinline__ void multiply(uint32 target, uint64 a, uint64 b,
                                                    uint32 a_scales, uint32 b_scales, int step,
                                                    bool accumulate) {
        constexpr int kBColumns = (S::kScaleTiles - 1) * kScaleTileColumns;
        tcgen05_multiply_nvf4<S::kCtas>(target, a, b,
                                        tcgen05_nvf4_instruction(S::kTileM, S::kTileN),
                                        a_scales + step * kScaleTileColumns,
                                        b_scales + step * kBColumns, accumulate);
    }
};

template <int kCtas, int kTileN, int kDown = 1, int kAcross = 1>
using Shape = ScaledShape<Nvfp4, kCtas, kTileN, kDown, kAcross>;

}  // namespace sm100_nvfp4
