// Block quantization of an FP32 matrix to MXFP8 where 128 x 128 elements share a scale by the RCEIL
// rule, as in weights: data and scales along rows, down columns (stored transposed), or both.
//
// `quantize.cu` supports such matrices, too. Here rows and columns are multiples of 128 and a CTA
// has one square, so that an element is quantized once for both operands, see
// `layout/mx_square_tile.cuh`.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_square_tile.cuh"
#include "layout/mx_statistics.cuh"

template <bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_square(const float* __restrict__ x, const MxTarget& to,
                                                MxTotals* totals, uint64* statistics) {
    constexpr uint64 kOperands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    __shared__ uint4 stage[kColumn ? kMxSquareStage : 1];
    __shared__ MxSquareShared shared;
    __shared__ MxTallyShared of_tally;
    MxTally tally(of_tally, totals);
    const uint32 across = to.columns / kMxTile;
    const uint32 row0 = blockIdx.x / across * kMxTile, column0 = blockIdx.x % across * kMxTile;
    const uint64 place = static_cast<uint64>(row0 + mx_square_row()) * to.columns + column0 +
                         mx_square_column();

    uint4 vectors[kMxSquareRows];
#pragma unroll
    for (int row = 0; row < kMxSquareRows; ++row) {
        vectors[row] = *reinterpret_cast<const uint4*>(
            x + place + static_cast<uint64>(row) * to.columns);
    }
    mx_quantize_square<kRow, kColumn>(vectors, row0, column0, to, stage, shared, tally);
    tally.finish(gridDim.x * gridDim.y, kOperands * to.rows * to.columns * gridDim.y, statistics);
}

// x [matrices, rows, columns]; outputs of each matrix as in `MxTarget`; statistics [6] over all.
// All pointers 16-byte aligned. Grid: one CTA per square along x, and per matrix along y.
#define QUANTIZE_KERNEL(name, row, column)                                                       \
    extern "C" __global__ void __launch_bounds__(kMxSquareThreads, 2)                            \
        name(const float* __restrict__ x, uint8* __restrict__ data, uint8* __restrict__ scales,  \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, MxTotals* totals, uint64* statistics) {                             \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        const uint64 first = static_cast<uint64>(rows) * columns * blockIdx.y;                   \
        quantize_square<row, column>(x + first, to.of_stack(blockIdx.y), totals, statistics);    \
    }

QUANTIZE_KERNEL(quantize_square_row, true, false)
QUANTIZE_KERNEL(quantize_square_column, false, true)
QUANTIZE_KERNEL(quantize_square_both, true, true)
