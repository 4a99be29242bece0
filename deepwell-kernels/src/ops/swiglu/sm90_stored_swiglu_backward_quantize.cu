// SwiGLU's backward from gate and up in MXFP8 with block quantization of both gradients, as
// `stored_swiglu_quantize.cu`, for whole tiles: `layout/gradient_pair_pipe.cuh`. The scales of a
// tile are loaded once for all threads.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "layout/gradient_pair_pipe.cuh"
#include "layout/stored_swiglu_rows.cuh"
#include "ptx/cp_async.cuh"

// Scales of the tile at hand, of gate and of up: a tile of elements has one tile of scales.
struct PipedScales {
    uint4 tiles[2][kScaleTileBytes / 16];

    // The scale of the thread's column in a row of a tile.
    __device__ __forceinline__ uint32 of(uint32 input, uint32 in_tile) const {
        const uint8* const tile = reinterpret_cast<const uint8*>(tiles[input]);
        return tile[scale_row_place(in_tile) + mx_plain_column() / kMxBlock];
    }
};

struct PipedSwigluRows : StoredSwigluRows {
    PipedScales& scales;

    __device__ __forceinline__ PipedSwigluRows(const bf16* dout, const StoredMatrix& gate,
                                               const StoredMatrix& up, uint32 columns,
                                               PipedScales& scales)
        : StoredSwigluRows(dout, gate, up, columns), scales(scales) {}

    __device__ __forceinline__ GradientVectors result(const ElementPlaces&,
                                                      const PairSources& sources,
                                                      uint32 in_tile) const {
        return stored_swiglu_gradients(sources.dout,
                                       StoredVector(sources.gate, scales.of(0, in_tile)),
                                       StoredVector(sources.up, scales.of(1, in_tile)));
    }
};

static_assert(kMxTile == kScaleTileRows && kMxTile == kScaleTileElements, "tiles coincide");

// Starts to load the codes of gate or up for a tile, and its scales.
__device__ __forceinline__ void pair_pipe_ask(const PipedSwigluRows& gradients,
                                              const ElementPlaces& tile, PairPipe& pipe) {
    const auto address = [](const void* shared) {
        return static_cast<uint32>(__cvta_generic_to_shared(shared));
    };
    if (tile.any()) {
        const StoredMatrix& source = threadIdx.y == 0 ? gradients.gate : gradients.up;
        const uint8* const codes = source.data + tile.plain_place(0).of(gradients.columns);
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            cp_async_8(address(&pipe.vectors[threadIdx.y][row][threadIdx.x]),
                       codes + static_cast<uint64>(row) * gradients.columns, 8);
        }
        if (threadIdx.x < kScaleTileBytes / 16) {
            const uint64 place = scale_tile_place(tile.row0, tile.column0, gradients.columns);
            cp_async_16(address(&gradients.scales.tiles[threadIdx.y][threadIdx.x]),
                        source.scales + place + 16 * threadIdx.x, 16);
        }
    }
    cp_async_commit();
}

// Codes take half of a vector in shared memory.
__device__ __forceinline__ PairSources pair_pipe_sources(const PipedSwigluRows&, const uint4& dout,
                                                         const uint4& gate, const uint4& up) {
    const auto codes = [](const uint4& vector) {
        const uint2 half = *reinterpret_cast<const uint2*>(&vector);
        return make_uint4(half.x, half.y, 0, 0);
    };
    return {dout, codes(gate), codes(up)};
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
        __shared__ PipedScales scales;                                                           \
        gradient_pair_pipe<row, column>(                                                         \
            PipedSwigluRows(dout, stored_gate, stored_up, columns, scales), of_gate, of_up);     \
    }

KERNEL(stored_swiglu_backward_quantize_row, true, false)
KERNEL(stored_swiglu_backward_quantize_column, false, true)
KERNEL(stored_swiglu_backward_quantize_both, true, true)
