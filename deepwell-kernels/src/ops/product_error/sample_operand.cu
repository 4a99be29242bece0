// The part of a matrix that an output tile of a GEMM reads: a window [window_rows, window_columns]
// from (row0, column0) on; elements beyond the matrix are zeros. Of an operand of a grouped GEMM it
// is that of one group (layout/sampled_group.cuh). A CTA copies whole rows.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/sampled_group.cuh"

constexpr int kThreads = 256;

template <typename E>
__device__ __forceinline__ void sample(const E* __restrict__ x, E* __restrict__ window,
                                       uint32 rows, uint32 columns, uint32 row0, uint32 column0,
                                       uint32 window_rows, uint32 window_columns,
                                       const int32* __restrict__ offsets, uint32 groups,
                                       Sampled part) {
    if (part != Sampled::kWhole) {
        const SampledGroup of = sampled_group(offsets, groups);
        if (part == Sampled::kMatrix) {
            x += static_cast<uint64>(of.group) * rows * columns;
        } else {
            row0 = part == Sampled::kRows ? of.first_sampled() : of.first;
            rows = of.end;
        }
    }
    for (uint32 row = blockIdx.x; row < window_rows; row += gridDim.x) {
        for (uint32 column = threadIdx.x; column < window_columns; column += kThreads) {
            E value = {};
            if (row0 + row < rows && column0 + column < columns) {
                value = x[static_cast<uint64>(row0 + row) * columns + column0 + column];
            }
            window[static_cast<uint64>(row) * window_columns + column] = value;
        }
    }
}

// x [rows, columns]; with offsets [groups + 1] rows of groups, or [groups, rows, columns].
#define SAMPLE_KERNEL(name, E)                                                                   \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const E* __restrict__ x, E* __restrict__ window, uint32 rows, uint32 columns,       \
             uint32 row0, uint32 column0, uint32 window_rows, uint32 window_columns,             \
             const int32* __restrict__ offsets, uint32 groups, uint32 part) {                    \
        sample(x, window, rows, columns, row0, column0, window_rows, window_columns, offsets,    \
               groups, static_cast<Sampled>(part));                                              \
    }

SAMPLE_KERNEL(sample_operand_bf16, bf16)
SAMPLE_KERNEL(sample_operand_f32, float)
