// SwiGLU, silu(gate) * up, and its backward, element by element over BF16 of any length: 16 bytes
// of each tensor per thread and step, arithmetic in FP32.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/activation.cuh"
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;

// gate, up, out [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    swiglu_bf16(const bf16* __restrict__ gate, const bf16* __restrict__ up,
                bf16* __restrict__ out, uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 2
    for (uint64 i = first; i < whole; i += stride) {
        float g[kWidth], u[kWidth], result[kWidth];
        unpack_bf16x8(reinterpret_cast<const uint4*>(gate)[i], g);
        unpack_bf16x8(reinterpret_cast<const uint4*>(up)[i], u);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            result[j] = swiglu(g[j], u[j]);
        }
        reinterpret_cast<uint4*>(out)[i] = pack_bf16x8(result);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        out[tail] = to_bf16(swiglu(to_f32(gate[tail]), to_f32(up[tail])));
    }
}

// dout, gate, up, dgate, dup [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    swiglu_backward_bf16(const bf16* __restrict__ dout, const bf16* __restrict__ gate,
                         const bf16* __restrict__ up, bf16* __restrict__ dgate,
                         bf16* __restrict__ dup, uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
    for (uint64 i = first; i < whole; i += stride) {
        float d[kWidth], g[kWidth], u[kWidth];
        unpack_bf16x8(reinterpret_cast<const uint4*>(dout)[i], d);
        unpack_bf16x8(reinterpret_cast<const uint4*>(gate)[i], g);
        unpack_bf16x8(reinterpret_cast<const uint4*>(up)[i], u);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            const SwigluGradients gradients = swiglu_gradients(d[j], g[j], u[j]);
            g[j] = gradients.gate;
            u[j] = gradients.up;
        }
        reinterpret_cast<uint4*>(dgate)[i] = pack_bf16x8(g);
        reinterpret_cast<uint4*>(dup)[i] = pack_bf16x8(u);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        const SwigluGradients gradients =
            swiglu_gradients(to_f32(dout[tail]), to_f32(gate[tail]), to_f32(up[tail]));
        dgate[tail] = to_bf16(gradients.gate);
        dup[tail] = to_bf16(gradients.up);
    }
}
