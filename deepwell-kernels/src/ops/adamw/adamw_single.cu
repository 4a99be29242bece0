// AdamW of one parameter. The addresses are arguments of the launch, not a table in device memory
// as in `adamw.cu`: a caller whose gradients move from step to step (a framework with an allocator)
// uploads nothing.
//
// The arithmetic is that of `adamw.cu`, bit by bit. A CTA has a chunk of 1024 elements, a thread
// four of them. A step whose norm is not finite changes nothing.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kQuad = 4;  // elements per thread
constexpr uint64 kChunk = kThreads * kQuad;

// The first four addresses are 16-byte aligned, copy is 8-byte aligned, and null if absent.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_single(const float* __restrict__ gradient, float* __restrict__ master,
                 float* __restrict__ first_moment, float* __restrict__ second_moment,
                 bf16* __restrict__ copy, uint64 elements, float weight_decay,
                 const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 at = blockIdx.x * kChunk + threadIdx.x * kQuad;
    const float decay = adamw_decay(c, weight_decay);
    if (at + kQuad <= elements) {
        const float4 g = *reinterpret_cast<const float4*>(gradient + at);
        float4 w = *reinterpret_cast<const float4*>(master + at);
        float4 m = *reinterpret_cast<const float4*>(first_moment + at);
        float4 v = *reinterpret_cast<const float4*>(second_moment + at);
        adamw_update(g, w, m, v, decay, c);
        *reinterpret_cast<float4*>(master + at) = w;
        *reinterpret_cast<float4*>(first_moment + at) = m;
        *reinterpret_cast<float4*>(second_moment + at) = v;
        if (copy != nullptr) {
            *reinterpret_cast<uint2*>(copy + at) =
                make_uint2(to_bf16_pair(w.x, w.y), to_bf16_pair(w.z, w.w));
        }
        return;
    }
#pragma unroll 1
    for (uint64 i = at; i < elements; ++i) {
        float w = master[i];
        adamw_update(gradient[i], w, first_moment[i], second_moment[i], decay, c);
        master[i] = w;
        if (copy != nullptr) {
            copy[i] = to_bf16(w);
        }
    }
}
