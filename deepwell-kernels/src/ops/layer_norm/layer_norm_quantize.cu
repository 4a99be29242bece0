// Layer normalization, optionally of a sum, with block quantization of the output to MXFP8: data
// and scales along rows, down columns, or both, and their counters. Operands as in `layer_norm.cu`
// and `quantize.cu`; `layout/norm_quantize.cuh` documents how the work is divided.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/norm_quantize.cuh"

// x, delta, sum, y [rows, columns], 16-byte aligned, columns a multiple of 8; only the kernels that
// add use delta and sum; y may be null. Outputs as in `MxTarget`; statistics [6]; grid, lookahead
// and counters as in `layout/norm_quantize.cuh`.
#define NORM_KERNEL(name, add, row, column)                                                      \
    extern "C" __global__ void __launch_bounds__(kMxPlainThreads, add ? 3 : 4)                   \
        name(const bf16* x, const bf16* delta, const bf16* weight, const bf16* bias, bf16* sum,  \
             bf16* y, float* mean, float* rstd, uint8* data, uint8* scales, uint8* data_t,       \
             uint8* scales_t, uint32 rows, uint32 columns, float eps, uint32 flags, uint32 lead, \
             uint32* counters, MxTotals* totals, uint64* statistics) {                           \
        const NormOperands operands = {x, delta, weight, bias, sum, y, mean, rstd, eps};         \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        norm_quantize<true, add, row, column>(operands, to, flags, lead, counters, totals,       \
                                              statistics);                                       \
    }

NORM_KERNEL(layer_norm_quantize_row, false, true, false)
NORM_KERNEL(layer_norm_quantize_column, false, false, true)
NORM_KERNEL(layer_norm_quantize_both, false, true, true)
NORM_KERNEL(add_layer_norm_quantize_row, true, true, false)
NORM_KERNEL(add_layer_norm_quantize_column, true, false, true)
NORM_KERNEL(add_layer_norm_quantize_both, true, true, true)
