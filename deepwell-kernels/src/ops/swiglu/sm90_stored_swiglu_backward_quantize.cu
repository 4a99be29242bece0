// SwiGLU's backward from gate and up in MXFP8 with block quantization of both gradients, as
// `stored_swiglu_quantize.cu`, for whole tiles: `layout/gradient_pair_pipe.cuh`.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "layout/gradient_pair_pipe.cuh"
#include "layout/stored_swiglu_rows.cuh"
#include "ptx/cp_async.cuh"

// Starts to load the codes of gate or up for a tile, and the scales of each row.
__device__ __forceinline__ void pair_pipe_ask(const StoredSwigluRows& gradients,
                                              const ElementPlaces& tile, PairPipe& pipe) {
    if (tile.any()) {
        const StoredMatrix& source = threadIdx.y == 0 ? gradients.gate : gradients.up;
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            const ElementPlace place = tile.plain_place(row);
            const uint32 to = static_cast<uint32>(
                __cvta_generic_to_shared(&pipe.vectors[threadIdx.y][row][threadIdx.x]));
            cp_async_8(to, source.data + place.of(gradients.columns), 8);
            cp_async_8(to + 8, source.scales_at(place, gradients.columns), 8);
        }
    }
    cp_async_commit();
}

// Arguments as in `stored_swiglu_quantize.cu`.
#define KERNEL(name, row, column)                                                                \
    extern "C" __global__ void __launch_bounds__(kPipeThreads, 2)                                \
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
        gradient_pair_pipe<row, column>(                                                         \
            StoredSwigluRows(dout, stored_gate, stored_up, columns), of_gate, of_up);            \
    }

KERNEL(stored_swiglu_backward_quantize_row, true, false)
KERNEL(stored_swiglu_backward_quantize_column, false, true)
KERNEL(stored_swiglu_backward_quantize_both, true, true)
