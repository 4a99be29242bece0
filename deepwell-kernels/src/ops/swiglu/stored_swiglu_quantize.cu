// SwiGLU from gate and up in MXFP8 with block quantization of the result to MXFP8, and its backward
// with quantization of both gradients: as `swiglu_quantize.cu`, with the bits of
// `stored_swiglu.cu`.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "layout/row_quantize.cuh"
#include "layout/stored_swiglu_rows.cuh"

// Data [rows, columns] and scales in tiles of gate and up; out [rows, columns], 16-byte aligned,
// may be null; columns a multiple of 8. Outputs as in `MxTarget`; statistics [6]. One CTA per tile,
// at least one.
#define FORWARD_KERNEL(name, row, column)                                                        \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const uint8* __restrict__ gate, const uint8* __restrict__ gate_scales,              \
             const uint8* __restrict__ up, const uint8* __restrict__ up_scales,                  \
             bf16* __restrict__ out, uint8* __restrict__ data, uint8* __restrict__ scales,       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics) {               \
        const StoredMatrix stored_gate = {gate, gate_scales}, stored_up = {up, up_scales};       \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        row_quantize<row, column>(StoredSwigluValues(stored_gate, stored_up, columns), 0, out,   \
                                  to, flags, totals, statistics);                                \
    }

FORWARD_KERNEL(stored_swiglu_quantize_row, true, false)
FORWARD_KERNEL(stored_swiglu_quantize_column, false, true)
FORWARD_KERNEL(stored_swiglu_quantize_both, true, true)

// dout, dgate, dup [rows, columns], 16-byte aligned, columns a multiple of 8; dgate and dup may be
// null. Data [rows, columns] and scales in tiles of gate and up. Outputs as in `MxTarget` for
// dgate, then for dup, with flags each; totals [2], statistics [6] each. One CTA per tile, at least
// one.
#define BACKWARD_KERNEL(name, row, column)                                                       \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ dout, const uint8* __restrict__ gate,                      \
             const uint8* __restrict__ gate_scales, const uint8* __restrict__ up,                \
             const uint8* __restrict__ up_scales, bf16* dgate, bf16* dup, uint8* gate_data,      \
             uint8* gate_scale_tiles, uint8* gate_data_t, uint8* gate_scales_t, uint8* up_data,  \
             uint8* up_scale_tiles, uint8* up_data_t, uint8* up_scales_t, uint32 rows,           \
             uint32 columns, uint32 gate_flags, uint32 up_flags, MxTotals* totals,               \
             uint64* gate_statistics, uint64* up_statistics) {                                   \
        const Gradient of_gate = {                                                               \
            dgate,                                                                               \
            {gate_data, gate_scale_tiles, gate_data_t, gate_scales_t, rows, columns},            \
            gate_flags,                                                                          \
            totals,                                                                              \
            gate_statistics};                                                                    \
        const Gradient of_up = {                                                                 \
            dup,                                                                                 \
            {up_data, up_scale_tiles, up_data_t, up_scales_t, rows, columns},                    \
            up_flags,                                                                            \
            totals + 1,                                                                          \
            up_statistics};                                                                      \
        const StoredMatrix stored_gate = {gate, gate_scales}, stored_up = {up, up_scales};       \
        gradient_pair_quantize<row, column>(                                                     \
            StoredSwigluRows(dout, stored_gate, stored_up, columns), of_gate, of_up);            \
    }

BACKWARD_KERNEL(stored_swiglu_backward_quantize_row, true, false)
BACKWARD_KERNEL(stored_swiglu_backward_quantize_column, false, true)
BACKWARD_KERNEL(stored_swiglu_backward_quantize_both, true, true)
