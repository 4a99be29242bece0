// GELU or its backward, with the normal distribution or in the tanh form, with block quantization
// of the result to MXFP8: data and scales along rows, down columns, or both, and their counters.
// The result has the bits of `gelu.cu`; `layout/elementwise_quantize.cuh` documents how the work is
// divided.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/activation.cuh"
#include "common/types.cuh"
#include "layout/elementwise_quantize.cuh"

// x, y [rows, columns], 16-byte aligned, columns a multiple of 8; y may be null. Outputs as in
// `MxTarget`; statistics [6]. One CTA per tile, at least one.
#define FORWARD_KERNEL(name, gelu, row, column)                                                  \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ x, bf16* __restrict__ y, uint8* __restrict__ data,         \
             uint8* __restrict__ scales, uint8* __restrict__ data_t,                             \
             uint8* __restrict__ scales_t, uint32 rows, uint32 columns, uint32 flags,            \
             MxTotals* totals, uint64* statistics) {                                             \
        const bf16* const sources[1] = {x};                                                      \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        elementwise_quantize<row, column>(sources, y, to, flags, totals, statistics,             \
                                          [](const float(&of)[1]) { return gelu(of[0]); });      \
    }

// dy, x, dx likewise.
#define BACKWARD_KERNEL(name, slope, row, column)                                                \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ dy, const bf16* __restrict__ x, bf16* __restrict__ dx,     \
             uint8* __restrict__ data, uint8* __restrict__ scales, uint8* __restrict__ data_t,   \
             uint8* __restrict__ scales_t, uint32 rows, uint32 columns, uint32 flags,            \
             MxTotals* totals, uint64* statistics) {                                             \
        const bf16* const sources[2] = {dy, x};                                                  \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        elementwise_quantize<row, column>(                                                       \
            sources, dx, to, flags, totals, statistics,                                          \
            [](const float(&of)[2]) { return of[0] * slope(of[1]); });                           \
    }

FORWARD_KERNEL(gelu_quantize_row, gelu, true, false)
FORWARD_KERNEL(gelu_quantize_column, gelu, false, true)
FORWARD_KERNEL(gelu_quantize_both, gelu, true, true)
FORWARD_KERNEL(gelu_tanh_quantize_row, gelu_tanh, true, false)
FORWARD_KERNEL(gelu_tanh_quantize_column, gelu_tanh, false, true)
FORWARD_KERNEL(gelu_tanh_quantize_both, gelu_tanh, true, true)
BACKWARD_KERNEL(gelu_backward_quantize_row, gelu_slope, true, false)
BACKWARD_KERNEL(gelu_backward_quantize_column, gelu_slope, false, true)
BACKWARD_KERNEL(gelu_backward_quantize_both, gelu_slope, true, true)
BACKWARD_KERNEL(gelu_tanh_backward_quantize_row, gelu_tanh_slope, true, false)
BACKWARD_KERNEL(gelu_tanh_backward_quantize_column, gelu_tanh_slope, false, true)
BACKWARD_KERNEL(gelu_tanh_backward_quantize_both, gelu_tanh_slope, true, true)
