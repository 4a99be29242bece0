// `expert_swiglu.cu` with block quantization of the result to MXFP8, and its backward with
// quantization of both gradients: data and scales along rows, down columns, or both, and their
// counters. Results have the bits of `expert_swiglu.cu`; `layout/row_quantize.cuh` and
// `layout/gradient_pair_quantize.cuh` document how the work is divided.
//
// dgates of a row is a sum over the row's tiles: each tile writes its partial sum to `parts`, and
// `expert_swiglu_dgates`, launched afterwards, adds these in the order of the columns.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/expert_activation.cuh"
#include "common/types.cuh"
#include "layout/gated_rows.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "layout/row_quantize.cuh"

constexpr uint32 kGateThreads = 256;

// gate, up, out [rows, columns], gates [tokens, top_k], pairs [rows]; 16-byte aligned, columns a
// multiple of 8; out may be null. Outputs as in `MxTarget`; statistics [6]. `alpha` and `limit` are
// parameters of the clamped activation. Grid as in `row_quantize`.
#define FORWARD_KERNEL(name, row, column, Activation, ...)                                       \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ gate, const bf16* __restrict__ up,                         \
             const float* __restrict__ gates, const int32* __restrict__ pairs,                   \
             bf16* __restrict__ out, uint8* __restrict__ data, uint8* __restrict__ scales,       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics, float alpha,    \
             float limit) {                                                                      \
        __shared__ GatedTiles tiles;                                                             \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        row_quantize<row, column>(                                                               \
            ActivatedRows<Activation>{Activation{__VA_ARGS__}, gate, up,                         \
                                      GatedRows(tiles, gates, pairs), columns},                  \
            0, out, to, flags, totals, statistics);                                              \
    }

// dout, gate, up, dgate, dup [rows, columns], gates [tokens, top_k], pairs [rows]; 16-byte aligned,
// columns a multiple of 8; dgate and dup may be null. Quantized operands of dgate, then of dup,
// with flags each; totals [2], statistics [6] each; parts [tiles of a row, rows].
#define BACKWARD_KERNEL(name, row, column, Activation, ...)                                      \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ dout, const bf16* __restrict__ gate,                       \
             const bf16* __restrict__ up, const float* __restrict__ gates,                       \
             const int32* __restrict__ pairs, bf16* dgate, bf16* dup, uint8* gate_data,          \
             uint8* gate_scales, uint8* gate_data_t, uint8* gate_scales_t, uint8* up_data,       \
             uint8* up_scales, uint8* up_data_t, uint8* up_scales_t, uint32 rows,                \
             uint32 columns, uint32 gate_flags, uint32 up_flags, MxTotals* totals,               \
             uint64* gate_statistics, uint64* up_statistics, float* parts, float alpha,          \
             float limit) {                                                                      \
        __shared__ GatedTiles tiles;                                                             \
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
        gradient_pair_quantize<row, column>(                                                     \
            ActivatedRowsGradients<Activation>{Activation{__VA_ARGS__}, dout, gate, up,          \
                                               GatedRows(tiles, gates, pairs), parts, columns},  \
            of_gate, of_up);                                                                     \
    }

FORWARD_KERNEL(expert_swiglu_quantize_row, true, false, Plain)
FORWARD_KERNEL(expert_swiglu_quantize_column, false, true, Plain)
FORWARD_KERNEL(expert_swiglu_quantize_both, true, true, Plain)
FORWARD_KERNEL(expert_swiglu_clamped_quantize_row, true, false, Clamped, alpha, limit)
FORWARD_KERNEL(expert_swiglu_clamped_quantize_column, false, true, Clamped, alpha, limit)
FORWARD_KERNEL(expert_swiglu_clamped_quantize_both, true, true, Clamped, alpha, limit)
BACKWARD_KERNEL(expert_swiglu_backward_quantize_row, true, false, Plain)
BACKWARD_KERNEL(expert_swiglu_backward_quantize_column, false, true, Plain)
BACKWARD_KERNEL(expert_swiglu_backward_quantize_both, true, true, Plain)
BACKWARD_KERNEL(expert_swiglu_clamped_backward_quantize_row, true, false, Clamped, alpha, limit)
BACKWARD_KERNEL(expert_swiglu_clamped_backward_quantize_column, false, true, Clamped, alpha, limit)
BACKWARD_KERNEL(expert_swiglu_clamped_backward_quantize_both, true, true, Clamped, alpha, limit)

// parts [tiles, rows], pairs [rows], row_of_pairs and dgates [tokens, top_k].
extern "C" __global__ void __launch_bounds__(kGateThreads)
    expert_swiglu_dgates(const float* __restrict__ parts, const int32* __restrict__ row_of_pairs,
                         const int32* __restrict__ pairs, float* __restrict__ dgates, uint32 rows,
                         uint32 tiles, uint32 pair_count) {
    const uint32 first = blockIdx.x * kGateThreads + threadIdx.x;
    const uint32 stride = gridDim.x * kGateThreads;
    for (uint32 pair = first; pair < pair_count; pair += stride) {
        if (row_of_pairs[pair] < 0) {
            dgates[pair] = 0.0f;
        }
    }
    for (uint32 row = first; row < rows; row += stride) {
        const int32 pair = pairs[row];
        if (pair < 0) {
            continue;
        }
        float dot = 0.0f;
#pragma unroll 4
        for (uint32 tile = 0; tile < tiles; ++tile) {
            dot += parts[static_cast<uint64>(tile) * rows + row];
        }
        dgates[pair] = dot;
    }
}
