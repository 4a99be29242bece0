// Converts E8M0 scales in tiles (layout/scale_tile.cuh), one per 32 elements along a row, to FP32
// scales per 128 elements, in cuBLASLt's layout, for both operands of a GEMM:
//   by rows     [ceil(K / 128), rows] row-major: one scale per row and 128 elements;
//   by squares  [ceil(rows / 128), ceil(K / 128) rounded up to 4] row-major: one scale per 128 rows
//               and 128 elements; the padding is zero.
// The four bytes of 128 elements are equal (in a square all bytes are), so the first byte is used.
// By rows, a warp converts a tile: a lane reads the 16 bytes of four rows, 32 apart, and
// neighbouring lanes write neighbouring scales. By squares, a thread converts a tile. The operands
// are indexed by the grid's second axis.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr int kSquareGroups = 4;  // multiple of groups to which rows of squares are padded
constexpr int kLaneRows = 4;      // rows of a tile per lane

struct Scales {
    const uint8* source;
    float* target;
    int32 rows;
    int32 k;
};

__device__ __forceinline__ void expand_rows(const Scales& scales) {
    constexpr int kWarps = kThreads / 32;
    const int32 lane = threadIdx.x % 32;
    const int32 across = scale_tiles_across(scales.k);
    const int32 down = (scales.rows + kScaleTileRows - 1) / kScaleTileRows;
    for (int32 tile = blockIdx.x * kWarps + threadIdx.x / 32; tile < down * across;
         tile += gridDim.x * kWarps) {
        const int32 m_block = tile / across, group = tile % across;
        const uint4 found = *reinterpret_cast<const uint4*>(
            scales.source + static_cast<int64>(tile) * kScaleTileBytes + lane * 16);
        const uint32 words[kLaneRows] = {found.x, found.y, found.z, found.w};
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int32 row = m_block * kScaleTileRows + i * 32 + lane;
            if (row < scales.rows) {
                scales.target[static_cast<int64>(group) * scales.rows + row] =
                    e8m0_to_f32(words[i] & 0xff);
            }
        }
    }
}

__device__ __forceinline__ void expand_squares(const Scales& scales) {
    const int32 across = scale_tiles_across(scales.k);
    const int32 padded = (across + kSquareGroups - 1) / kSquareGroups * kSquareGroups;
    const int32 down = (scales.rows + kScaleTileRows - 1) / kScaleTileRows;
    for (int32 i = blockIdx.x * kThreads + threadIdx.x; i < down * padded;
         i += gridDim.x * kThreads) {
        const int32 m_block = i / padded, group = i % padded;
        const int64 tile = static_cast<int64>(m_block) * across + group;
        scales.target[i] =
            group < across ? e8m0_to_f32(scales.source[tile * kScaleTileBytes]) : 0.0f;
    }
}

// Scales of a [a_rows, k] and b [b_rows, k]; `squares` has bit 0 for a and bit 1 for b.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand_scales(const uint8* __restrict__ a, float* __restrict__ a_target, int32 a_rows,
                  const uint8* __restrict__ b, float* __restrict__ b_target, int32 b_rows,
                  int32 k, uint32 squares) {
    const bool of_a = blockIdx.y == 0;
    const Scales scales = of_a ? Scales{a, a_target, a_rows, k}
                               : Scales{b, b_target, b_rows, k};
    if (squares & (of_a ? 1 : 2)) {
        expand_squares(scales);
    } else {
        expand_rows(scales);
    }
}
