// The backward of experts' gated activation with block quantization of both gradients, as
// `expert_swiglu_quantize.cu`, for whole tiles: `layout/gradient_pair_pipe.cuh`.
//
// architectures: sm_90a
#include "common/expert_activation.cuh"
#include "common/types.cuh"
#include "layout/gated_rows.cuh"
#include "layout/gradient_pair_pipe.cuh"

// Arguments as in `expert_swiglu_quantize.cu`.
#define KERNEL(name, row, column, Activation, ...)                                      \
    extern "C" __global__ void __launch_bounds__(kPipeThreads, 2)                                \
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
        gradient_pair_pipe<row, column>(                                                         \
            ActivatedRowsGradients<Activation>{Activation{__VA_ARGS__}, dout, gate, up,          \
                                               GatedRows(tiles, gates, pairs), parts, columns},  \
            of_gate, of_up);                                                                     \
    }

KERNEL(expert_swiglu_backward_quantize_row, true, false, Plain)
KERNEL(expert_swiglu_backward_quantize_column, false, true, Plain)
KERNEL(expert_swiglu_backward_quantize_both, true, true, Plain)
KERNEL(expert_swiglu_clamped_backward_quantize_row, true, false, Clamped, alpha, limit)
KERNEL(expert_swiglu_clamped_backward_quantize_column, false, true, Clamped, alpha, limit)
KERNEL(expert_swiglu_clamped_backward_quantize_both, true, true, Clamped, alpha, limit)
