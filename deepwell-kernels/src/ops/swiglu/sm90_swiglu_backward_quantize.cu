// SwiGLU's backward with block quantization of both gradients, as `swiglu_quantize.cu`, for whole
// tiles: `layout/gradient_pair_pipe.cuh`.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "layout/gradient_pair_pipe.cuh"
#include "layout/swiglu_rows.cuh"

// Arguments as in `swiglu_quantize.cu`.
#define KERNEL(name, row, column)                                                                \
    extern "C" __global__ void __launch_bounds__(kPipeThreads, 2)                                \
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
        gradient_pair_pipe<row, column>(SwigluRows(dout, gate, up, columns), of_gate, of_up);    \
    }

KERNEL(swiglu_backward_quantize_row, true, false)
KERNEL(swiglu_backward_quantize_column, false, true)
KERNEL(swiglu_backward_quantize_both, true, true)
