// SwiGLU with block quantization of the result to MXFP8, and its backward with quantization of both
// gradients: data and scales along rows, down columns, or both, and their counters. Results have
// the bits of `swiglu.cu`; `layout/row_quantize.cuh` and `layout/gradient_pair_quantize.cuh`
// document how the work is divided.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/activation.cuh"
#include "common/types.cuh"
#include "layout/elementwise_quantize.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "layout/swiglu_rows.cuh"

// gate, up, out [rows, columns], 16-byte aligned, columns a multiple of 8; out may be null. Outputs
// as in `MxTarget`; statistics [6]. One CTA per tile, at least one.
#define FORWARD_KERNEL(name, row, column)                                                        \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ gate, const bf16* __restrict__ up, bf16* __restrict__ out, \
             uint8* __restrict__ data, uint8* __restrict__ scales, uint8* __restrict__ data_t,   \
             uint8* __restrict__ scales_t, uint32 rows, uint32 columns, uint32 flags,            \
             MxTotals* totals, uint64* statistics) {                                             \
        const bf16* const sources[2] = {gate, up};                                               \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        elementwise_quantize<row, column>(                                                       \
            sources, out, to, flags, totals, statistics,                                         \
            [](const float(&of)[2]) { return swiglu(of[0], of[1]); });                           \
    }

FORWARD_KERNEL(swiglu_quantize_row, true, false)
FORWARD_KERNEL(swiglu_quantize_column, false, true)
FORWARD_KERNEL(swiglu_quantize_both, true, true)

// dout, gate, up, dgate, dup [rows, columns], 16-byte aligned, columns a multiple of 8; dgate and
// dup may be null. Quantized operands of dgate, then of dup, with flags each; totals [2],
// statistics [6] each. One CTA per tile, at least one.
#define BACKWARD_KERNEL(name, row, column)                                                       \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ dout, const bf16* __restrict__ gate,                       \
             const bf16* __restrict__ up, bf16* dgate, bf16* dup, uint8* gate_data,              \
             uint8* gate_scales, uint8* gate_data_t, uint8* gate_scales_t, uint8* up_data,       \
             uint8* up_scales, uint8* up_data_t, uint8* up_scales_t, uint32 rows,                \
             uint32 columns, uint32 gate_flags, uint32 up_flags, MxTotals* totals,               \
             uint64* gate_statistics, uint64* up_statistics) {                                   \
        const Gradient of_gate = {                                                               \
            dgate,                                                                               \
            {gate_data, gate_scales, gate_data_t, gate_scales_t, rows, columns},                 \
            gate_flags,                                                                          \
            totals,                                                                              \
            gate_statistics};                                                                    \
        const Gradient of_up = {dup,                                                             \
                                {up_data, up_scales, up_data_t, up_scales_t, rows, columns},     \
                                up_flags,                                                        \
                                totals + 1,                                                      \
                                up_statistics};                                                  \
        gradient_pair_quantize<row, column>(SwigluRows(dout, gate, up, columns), of_gate, of_up); \
    }

BACKWARD_KERNEL(swiglu_backward_quantize_row, true, false)
BACKWARD_KERNEL(swiglu_backward_quantize_column, false, true)
BACKWARD_KERNEL(swiglu_backward_quantize_both, true, true)
