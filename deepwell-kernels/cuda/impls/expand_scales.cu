// From E8M0 scales, one for each 32 codes along a row, to FP32 scales for 128, as the vendor's
// library reads them, of both operands of a product at once:
//   by rows     [ceil(K / 128), rows] row-major: one for each row and 128 codes;
//   by squares  [ceil(rows / 128), ceil(K / 128) rounded up to 4] row-major: one for each 128 rows
//               and 128 codes; what rounding adds is zero.
// The four bytes of 128 codes are equal (of a square all its bytes): the first is taken. A thread
// takes one row (of squares) and up to four groups, so that it reads within 16 bytes of the row,
// and threads next to each other take rows next to each other, which lie together in the result.
// Operands stand along the grid's second axis.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/e8m0.cuh"

constexpr int kThreads = 256;
constexpr int kGroups = 4;      // of a thread
constexpr int kGroupBytes = 4;  // scales of 32 codes in one of 128
constexpr int kSquareRows = 128;

struct Scales {
    const uint8* source;  // [rows, blocks]
    float* target;
    int32 rows;
    int32 blocks;
    bool squares;
};

__device__ __forceinline__ void expand(const Scales& scales) {
    const int32 groups = (scales.blocks + kGroupBytes - 1) / kGroupBytes;
    const int32 strips = (groups + kGroups - 1) / kGroups;
    const int32 rows =
        scales.squares ? (scales.rows + kSquareRows - 1) / kSquareRows : scales.rows;
    const int64 items = static_cast<int64>(rows) * strips;
    const int64 stride = static_cast<int64>(gridDim.x) * kThreads;
    for (int64 i = static_cast<int64>(blockIdx.x) * kThreads + threadIdx.x; i < items;
         i += stride) {
        const int32 strip = i / rows;
        const int32 row = i - static_cast<int64>(strip) * rows;
        const int64 source_row = scales.squares ? row * static_cast<int64>(kSquareRows) : row;
        const uint8* source = scales.source + source_row * scales.blocks;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const int32 group = strip * kGroups + j;
            const bool inside = group < groups;
            const float scale = inside ? e8m0_to_f32(source[group * kGroupBytes]) : 0.0f;
            if (scales.squares) {
                const int64 width = static_cast<int64>(strips) * kGroups;
                scales.target[row * width + group] = scale;
            } else if (inside) {
                scales.target[static_cast<int64>(group) * rows + row] = scale;
            }
        }
    }
}

// a [a_rows, blocks], b [b_rows, blocks]; `squares` has bit 0 for a and bit 1 for b.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand_scales(const uint8* __restrict__ a, float* __restrict__ a_target, int32 a_rows,
                  const uint8* __restrict__ b, float* __restrict__ b_target, int32 b_rows,
                  int32 blocks, uint32 squares) {
    if (blockIdx.y == 0) {
        expand(Scales{a, a_target, a_rows, blocks, (squares & 1) != 0});
    } else {
        expand(Scales{b, b_target, b_rows, blocks, (squares & 2) != 0});
    }
}
