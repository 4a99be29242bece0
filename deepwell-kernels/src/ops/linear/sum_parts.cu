// Sums the parts of a split-K GEMM (sm90_bf16_gemm.cu) in order: out [rows, columns] (+)= sum of
// parts [count, rows, columns] (+ bias [columns]), in FP32, rounded once for a BF16 result. Static
// persistent: a thread sums four elements of a row at a time, or one if rows are not multiples of
// four.
//
// architectures: sm_90a
#include "common/types.cuh"

constexpr int kThreads = 256;

struct Parts {
    const float* data;
    uint64 elements;  // per part
    int32 count;
    int32 columns;
};

__device__ __forceinline__ float4 load_four(const float* from) {
    return *reinterpret_cast<const float4*>(from);
}

__device__ __forceinline__ void add_four(float4& sum, const float4& value) {
    sum.x += value.x;
    sum.y += value.y;
    sum.z += value.z;
    sum.w += value.w;
}

__device__ __forceinline__ float4 bias_of_four(const float* bias, uint32 column) {
    return load_four(bias + column);
}

__device__ __forceinline__ float4 bias_of_four(const bf16* bias, uint32 column) {
    const uint2 pairs = *reinterpret_cast<const uint2*>(bias + column);
    return make_float4(low_to_f32(pairs.x), high_to_f32(pairs.x), low_to_f32(pairs.y),
                       high_to_f32(pairs.y));
}

__device__ __forceinline__ void store_four(float* place, const float4& sum, bool accumulate) {
    auto* target = reinterpret_cast<float4*>(place);
    float4 result = sum;
    if (accumulate) {
        add_four(result, *target);
    }
    *target = result;
}

__device__ __forceinline__ void store_four(bf16* place, const float4& sum, bool) {
    *reinterpret_cast<uint2*>(place) =
        make_uint2(to_bf16_pair(sum.x, sum.y), to_bf16_pair(sum.z, sum.w));
}

__device__ __forceinline__ void store_one(float* place, float sum, bool accumulate) {
    *place = accumulate ? *place + sum : sum;
}

__device__ __forceinline__ void store_one(bf16* place, float sum, bool) {
    *place = to_bf16(sum);
}

template <typename Element>
__device__ __forceinline__ void sum_parts(const Parts& parts, const Element* bias, Element* out,
                                          bool accumulate) {
    const uint64 first = blockIdx.x * static_cast<uint64>(kThreads) + threadIdx.x;
    const uint64 step = gridDim.x * static_cast<uint64>(kThreads);
    if (parts.columns % 4 == 0) {
        for (uint64 at = first * 4; at < parts.elements; at += step * 4) {
            float4 sum = load_four(parts.data + at);
#pragma unroll 8
            for (int32 part = 1; part < parts.count; ++part) {
                add_four(sum, load_four(parts.data + part * parts.elements + at));
            }
            if (bias != nullptr) {
                add_four(sum, bias_of_four(bias, at % parts.columns));
            }
            store_four(out + at, sum, accumulate);
        }
    } else {
        for (uint64 at = first; at < parts.elements; at += step) {
            float sum = parts.data[at];
            for (int32 part = 1; part < parts.count; ++part) {
                sum += parts.data[part * parts.elements + at];
            }
            if (bias != nullptr) {
                sum += to_f32(bias[at % parts.columns]);
            }
            store_one(out + at, sum, accumulate);
        }
    }
}

// `accumulate` adds to an FP32 result; bias [columns] or null.
#define SUM_PARTS(name, Element)                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const float* __restrict__ parts, const Element* __restrict__ bias,                  \
             Element* __restrict__ out, uint64 elements, int32 columns, int32 count,             \
             uint32 accumulate) {                                                                \
        sum_parts(Parts{parts, elements, count, columns}, bias, out, accumulate != 0);           \
    }

SUM_PARTS(sum_parts_bf16, bf16)
SUM_PARTS(sum_parts_f32, float)
