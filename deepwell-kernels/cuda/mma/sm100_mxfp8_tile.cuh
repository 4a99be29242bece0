// MXFP8 operands of a GEMM on tcgen05: one-byte elements with a scale per 32 along K. See
// mma/sm100_scaled_tile.cuh.
#pragma once

#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_scaled_tile.cuh"

namespace sm100_mxfp8 {

using namespace sm100_scaled;

// Tensor maps of scales have boxes of a scale tile, as a matrix of 256 columns.
struct Mxfp8 {
    static constexpr int kStageK = kStageRowBytes;
    static constexpr int kScaleSteps = 1;
    static constexpr int kScaleBoxes = 2;  // rows of 256 bytes of a scale tile

    // Copies the scale tiles of `kTiles` * 128 rows, from `row` on, and one K-block.
    template <typename S, int kTiles>
    static __device__ __forceinline__ void copy_scales(uint8* target, const TensorMap& scales,
                                                       uint32 row, int32 k_block,
                                                       int32 k_blocks, uint32 barrier,
                                                       const Sharers& sharers) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
            const uint32 tile = (row / kScaleTileRows + i) * k_blocks + k_block;
            copy_box<S, 1>(target + i * kScaleTileBytes, scales, 0, tile * kScaleBoxes, barrier,
                           sharers);
        }
    }

    // A column of tensor memory has the scales of all steps of a row.
    template <typename S>
    static __device__ __forceinline__ void multiply(uint32 target, uint64 a, uint64 b,
                                                    uint32 a_scales, uint32 b_scales, int step,
                                                    bool accumulate) {
        tcgen05_multiply_mxf8<S::kCtas>(target, a, b,
                                        tcgen05_mxf8_instruction(S::kTileM, S::kTileN, step),
                                        a_scales, b_scales, accumulate);
    }
};

template <int kCtas, int kTileN, int kDown = 1, int kAcross = 1>
using Shape = ScaledShape<Mxfp8, kCtas, kTileN, kDown, kAcross>;

}  // namespace sm100_mxfp8
