// Merges attention to disjoint sets of keys: with lse = ln sum exp(lse_i) over the parts, out = sum
// of exp(lse_i - lse) out_i, in the order of the parts, in FP32.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// out_i [batch * seq, heads * width], lse_i, lse [batch, heads, seq] FP32, out of the kernel's
// dtype; width a multiple of 4. A part that is hidden from a row has -inf as lse_i and contributes
// nothing; a row without any visible key gets zeros, and -inf. Roofline: 4 parts + 4 or 2 bytes per
// element at memcpy bandwidth.
//
// A thread has four elements of a row and recomputes the row's weights from lse_i in the L1 cache.
#include "common/infinity.cuh"
#include "common/types.cuh"
#include "ptx/exp2.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 4;
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2E = 1.4426950408889634f;

struct Part {
    const float* out;
    const float* lse;
};

// exp(x - greatest); 0 for x = -inf with any greatest.
__device__ __forceinline__ float weight_of(float x, float greatest) {
    return x == minus_infinity() ? 0.0f : ex2((x - greatest) * kLog2E);
}

__device__ __forceinline__ void store(float* to, float4 values) {
    *reinterpret_cast<float4*>(to) = values;
}

__device__ __forceinline__ void store(bf16* to, float4 values) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(to_bf16_pair(values.x, values.y), to_bf16_pair(values.z, values.w));
}

// `units` of four elements per row, `items` over all rows.
template <typename Out>
__device__ __forceinline__ void merge(const Part* __restrict__ parts, uint32 count, Out* out,
                                      float* lse, uint32 items, uint32 heads, uint32 seq,
                                      uint32 units) {
    const uint32 item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) {
        return;
    }
    const uint32 row = item / units;
    const uint32 token = row / heads;
    const uint32 head = row - token * heads;
    const uint32 batch = token / seq;
    const uint32 at = (batch * heads + head) * seq + (token - batch * seq);
    float greatest = minus_infinity();
    for (uint32 part = 0; part < count; ++part) {
        greatest = fmaxf(greatest, parts[part].lse[at]);
    }
    float total = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32 part = 0; part < count; ++part) {
        const float weight = weight_of(parts[part].lse[at], greatest);
        const float4 of = reinterpret_cast<const float4*>(parts[part].out)[item];
        total += weight;
        sum.x = fmaf(weight, of.x, sum.x);
        sum.y = fmaf(weight, of.y, sum.y);
        sum.z = fmaf(weight, of.z, sum.z);
        sum.w = fmaf(weight, of.w, sum.w);
    }
    const float scale = total == 0.0f ? 0.0f : 1.0f / total;
    store(out + static_cast<uint64>(item) * kWidth,
          make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale));
    if (item == row * units) {
        lse[at] = greatest + lg2(total) * kLn2;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_attention_f32(const Part* parts, uint32 count, float* out, float* lse, uint32 items,
                        uint32 heads, uint32 seq, uint32 units) {
    merge(parts, count, out, lse, items, heads, seq, units);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    merge_attention_bf16(const Part* parts, uint32 count, bf16* out, float* lse, uint32 items,
                         uint32 heads, uint32 seq, uint32 units) {
    merge(parts, count, out, lse, items, heads, seq, units);
}
