// Element-wise sum of two BF16 or FP32 tensors, 16 bytes per thread and step.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;

__device__ __forceinline__ uint32 add_pair(uint32 a, uint32 b) {
    return to_bf16_pair(low_to_f32(a) + low_to_f32(b), high_to_f32(a) + high_to_f32(b));
}

// a, b, sum [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_bf16(const bf16* __restrict__ a, const bf16* __restrict__ b, bf16* __restrict__ sum,
             uint64 elements) {
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
    for (uint64 i = first; i < whole; i += stride) {
        const uint4 x = reinterpret_cast<const uint4*>(a)[i];
        const uint4 y = reinterpret_cast<const uint4*>(b)[i];
        reinterpret_cast<uint4*>(sum)[i] =
            make_uint4(add_pair(x.x, y.x), add_pair(x.y, y.y), add_pair(x.z, y.z),
                       add_pair(x.w, y.w));
    }
    const uint64 tail = whole * kWidth + first;
    if (tail < elements) {
        sum[tail] = to_bf16(to_f32(a[tail]) + to_f32(b[tail]));
    }
}

// The same kernel in FP32, for gradients of a router's logits.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_f32(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ sum,
            uint64 elements) {
    constexpr int kWidthF32 = 4;
    const uint64 whole = elements / kWidthF32;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kThreads;
    const uint64 first = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x;
    for (uint64 i = first; i < whole; i += stride) {
        const float4 x = reinterpret_cast<const float4*>(a)[i];
        const float4 y = reinterpret_cast<const float4*>(b)[i];
        reinterpret_cast<float4*>(sum)[i] =
            make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
    }
    const uint64 tail = whole * kWidthF32 + first;
    if (tail < elements) {
        sum[tail] = a[tail] + b[tail];
    }
}
