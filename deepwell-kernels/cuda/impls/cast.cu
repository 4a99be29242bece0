// F32 to BF16 (to nearest, ties to even) and back, eight elements a thread and step.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;

// x, y [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    cast_f32_to_bf16(const float* __restrict__ x, bf16* __restrict__ y, uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 2
    for (uint64 i = first; i < whole; i += stride) {
        const float4 low = reinterpret_cast<const float4*>(x)[2 * i];
        const float4 high = reinterpret_cast<const float4*>(x)[2 * i + 1];
        reinterpret_cast<uint4*>(y)[i] =
            make_uint4(to_bf16_pair(low.x, low.y), to_bf16_pair(low.z, low.w),
                       to_bf16_pair(high.x, high.y), to_bf16_pair(high.z, high.w));
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        y[tail] = to_bf16(x[tail]);
    }
}

// x, y [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    cast_bf16_to_f32(const bf16* __restrict__ x, float* __restrict__ y, uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 2
    for (uint64 i = first; i < whole; i += stride) {
        float values[kWidth];
        unpack_bf16x8(reinterpret_cast<const uint4*>(x)[i], values);
        float4* target = reinterpret_cast<float4*>(y) + 2 * i;
        target[0] = make_float4(values[0], values[1], values[2], values[3]);
        target[1] = make_float4(values[4], values[5], values[6], values[7]);
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        y[tail] = to_f32(x[tail]);
    }
}
