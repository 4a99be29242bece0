// GELU and its backward, with the normal distribution or in the tanh form, element by element over
// BF16 of any length: 16 bytes of each tensor per thread and step, arithmetic in FP32.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/activation.cuh"
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;

template <bool kTanh>
__device__ __forceinline__ float value_of(float x) {
    return kTanh ? gelu_tanh(x) : gelu(x);
}

template <bool kTanh>
__device__ __forceinline__ float gradient_of(float dy, float x) {
    return dy * (kTanh ? gelu_tanh_slope(x) : gelu_slope(x));
}

template <bool kTanh>
__device__ __forceinline__ void forward(const bf16* __restrict__ x, bf16* __restrict__ y,
                                        uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 2
    for (uint64 i = first; i < whole; i += stride) {
        float values[kWidth];
        unpack_bf16x8(reinterpret_cast<const uint4*>(x)[i], values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            values[j] = value_of<kTanh>(values[j]);
        }
        reinterpret_cast<uint4*>(y)[i] = pack_bf16x8(values);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        y[tail] = to_bf16(value_of<kTanh>(to_f32(x[tail])));
    }
}

template <bool kTanh>
__device__ __forceinline__ void backward(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                                         bf16* __restrict__ dx, uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 2
    for (uint64 i = first; i < whole; i += stride) {
        float gradients[kWidth], values[kWidth];
        unpack_bf16x8(reinterpret_cast<const uint4*>(dy)[i], gradients);
        unpack_bf16x8(reinterpret_cast<const uint4*>(x)[i], values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            values[j] = gradient_of<kTanh>(gradients[j], values[j]);
        }
        reinterpret_cast<uint4*>(dx)[i] = pack_bf16x8(values);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        dx[tail] = to_bf16(gradient_of<kTanh>(to_f32(dy[tail]), to_f32(x[tail])));
    }
}

// x, y [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    gelu_bf16(const bf16* __restrict__ x, bf16* __restrict__ y, uint64 elements) {
    forward<false>(x, y, elements);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gelu_tanh_bf16(const bf16* __restrict__ x, bf16* __restrict__ y, uint64 elements) {
    forward<true>(x, y, elements);
}

// dy, x, dx [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    gelu_backward_bf16(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                       bf16* __restrict__ dx, uint64 elements) {
    backward<false>(dy, x, dx, elements);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    gelu_tanh_backward_bf16(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                            bf16* __restrict__ dx, uint64 elements) {
    backward<true>(dy, x, dx, elements);
}
