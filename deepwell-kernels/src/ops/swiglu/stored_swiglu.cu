// SwiGLU and its backward from gate and up in MXFP8, with the bits of `dequantize.cu` and
// `swiglu.cu`: eight elements per thread and step, arithmetic in FP32.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/stored_swiglu_rows.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kWidth = 8;

// Calls `function(place)` for each vector of eight elements of a matrix.
template <typename Function>
__device__ __forceinline__ void each_vector(uint32 rows, uint32 columns,
                                            const Function& function) {
    const uint32 across = columns / kWidth;
    const uint64 vectors = static_cast<uint64>(rows) * across;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    for (uint64 i = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
         i += stride) {
        const uint32 row = static_cast<uint32>(i / across);
        const uint32 vector = static_cast<uint32>(i - static_cast<uint64>(row) * across);
        function(ElementPlace{row, vector * kWidth});
    }
}

// Data [rows, columns] and scales in tiles of gate and up; out [rows, columns], 16-byte aligned,
// columns a multiple of 8.
extern "C" __global__ void __launch_bounds__(kThreads)
    stored_swiglu_bf16(const uint8* __restrict__ gate, const uint8* __restrict__ gate_scales,
                       const uint8* __restrict__ up, const uint8* __restrict__ up_scales,
                       bf16* __restrict__ out, uint32 rows, uint32 columns) {
    const StoredMatrix of_gate = {gate, gate_scales}, of_up = {up, up_scales};
    each_vector(rows, columns, [&](const ElementPlace& place) {
        const uint4 vector = stored_swiglu(of_gate.load(place, columns),
                                           of_up.load(place, columns), place);
        store_vector(out, place, columns, vector);
    });
}

// dout, dgate, dup [rows, columns], 16-byte aligned; others as above.
extern "C" __global__ void __launch_bounds__(kThreads)
    stored_swiglu_backward_bf16(const bf16* __restrict__ dout, const uint8* __restrict__ gate,
                                const uint8* __restrict__ gate_scales,
                                const uint8* __restrict__ up,
                                const uint8* __restrict__ up_scales, bf16* __restrict__ dgate,
                                bf16* __restrict__ dup, uint32 rows, uint32 columns) {
    const StoredMatrix of_gate = {gate, gate_scales}, of_up = {up, up_scales};
    each_vector(rows, columns, [&](const ElementPlace& place) {
        const PairSources sources = {load_vector(dout, place, columns),
                                     of_gate.load(place, columns), of_up.load(place, columns)};
        const GradientVectors of = stored_swiglu_gradients(sources, place);
        store_vector(dgate, place, columns, of.gate);
        store_vector(dup, place, columns, of.up);
    });
}
