// F32 to BF16 (to nearest, ties to even) and back. A thread converts four groups of four elements
// of a tile of 4096, with a CTA's width between groups, and reads all groups before it writes. For
// most tensors every CTA has one tile, so a CTA waits for memory once.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"

constexpr int kThreads = 256;
// Elements per group, and groups per thread.
constexpr int kWidth = 4;
constexpr int kGroups = 4;

struct Fp32ToBf16 {
    using Input = float4;
    using Output = uint2;

    static __device__ __forceinline__ uint2 of_group(float4 x) {
        return make_uint2(to_bf16_pair(x.x, x.y), to_bf16_pair(x.z, x.w));
    }

    static __device__ __forceinline__ bf16 of_one(float x) {
        return to_bf16(x);
    }
};

struct Bf16ToFp32 {
    using Input = uint2;
    using Output = float4;

    static __device__ __forceinline__ float4 of_group(uint2 x) {
        return make_float4(low_to_f32(x.x), high_to_f32(x.x), low_to_f32(x.y), high_to_f32(x.y));
    }

    static __device__ __forceinline__ float of_one(bf16 x) {
        return to_f32(x);
    }
};

template <typename Conversion, typename From, typename To>
__device__ __forceinline__ void cast(const From* __restrict__ x, To* __restrict__ y,
                                     uint64 elements) {
    using Input = typename Conversion::Input;
    using Output = typename Conversion::Output;
    const uint64 whole = elements / kWidth;
    const uint64 stride = static_cast<uint64>(gridDim.x) * (kThreads * kGroups);
    for (uint64 first = static_cast<uint64>(blockIdx.x) * (kThreads * kGroups) + threadIdx.x;
         first < whole; first += stride) {
        Input values[kGroups];
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
            if (first + k * kThreads < whole) {
                values[k] = reinterpret_cast<const Input*>(x)[first + k * kThreads];
            }
        }
#pragma unroll
        for (int k = 0; k < kGroups; ++k) {
            if (first + k * kThreads < whole) {
                reinterpret_cast<Output*>(y)[first + k * kThreads] =
                    Conversion::of_group(values[k]);
            }
        }
    }
    const uint64 tail = whole * kWidth + threadIdx.x;
    if (blockIdx.x == 0 && tail < elements) {
        y[tail] = Conversion::of_one(x[tail]);
    }
}

// x, y [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    cast_f32_to_bf16(const float* __restrict__ x, bf16* __restrict__ y, uint64 elements) {
    cast<Fp32ToBf16>(x, y, elements);
}

// x, y [elements]; 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    cast_bf16_to_f32(const bf16* __restrict__ x, float* __restrict__ y, uint64 elements) {
    cast<Bf16ToFp32>(x, y, elements);
}
