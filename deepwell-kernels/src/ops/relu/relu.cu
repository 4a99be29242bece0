// ReLU and its backward, element by element over BF16 of any length: 16 bytes of each tensor per
// thread and step.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;

// Returns `of` if x is positive or NaN, else zero.
__device__ __forceinline__ float passed(float of, float x) {
    return x <= 0.0f ? 0.0f : of;
}

// x, y [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    relu_bf16(const bf16* __restrict__ x, bf16* __restrict__ y, uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 2
    for (uint64 i = first; i < whole; i += stride) {
        float values[kWidth];
        unpack_bf16x8(reinterpret_cast<const uint4*>(x)[i], values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
            values[j] = passed(values[j], values[j]);
        }
        reinterpret_cast<uint4*>(y)[i] = pack_bf16x8(values);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        y[tail] = to_bf16(passed(to_f32(x[tail]), to_f32(x[tail])));
    }
}

// dy, x, dx [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    relu_backward_bf16(const bf16* __restrict__ dy, const bf16* __restrict__ x,
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
            values[j] = passed(gradients[j], values[j]);
        }
        reinterpret_cast<uint4*>(dx)[i] = pack_bf16x8(values);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        dx[tail] = to_bf16(passed(to_f32(dy[tail]), to_f32(x[tail])));
    }
}
