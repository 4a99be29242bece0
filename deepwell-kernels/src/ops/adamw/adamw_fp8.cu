// AdamW over a bucket of parameters in one launch, with moments in eight bits; otherwise as in
// `adamw.cu`. 16 bytes move per parameter: gradient, weight twice, and two codes twice.
//
// Random bits of the rounding follow from the number of the step, the parameter and the element.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "layout/adamw_fp8_chunk.cuh"
#include "common/types.cuh"

// A non-empty parameter of the list; the first four pointers are 16-byte aligned.
struct Parameter {
    const float* gradient;
    float* master;
    uint8* first_moment;
    uint8* second_moment;
    bf16* copy;  // BF16 weights; 8-byte aligned, null if absent
    uint64 elements;
    uint64 first_chunk;
    float weight_decay;
    uint32 index;  // among the parameters of the program
};

static_assert(sizeof(Parameter) == 64, "the host writes this layout");

// Weights in FP32, with copies in BF16.
struct WideMasters {
    using Stored = float4;
    float* master;
    bf16* copy;

    __device__ __forceinline__ float4 load(uint64 at, uint64 count) const {
        return load_quad(master + at, count);
    }
    static __device__ __forceinline__ float4 widen(const float4& w) { return w; }
    __device__ __forceinline__ void store(uint64 at, const float4& w, uint64 count, uint32,
                                          float) const {
        if (count >= 4) {
            *reinterpret_cast<float4*>(master + at) = w;
            if (copy != nullptr) {
                *reinterpret_cast<uint2*>(copy + at) =
                    make_uint2(to_bf16_pair(w.x, w.y), to_bf16_pair(w.z, w.w));
            }
            return;
        }
        const float last[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (uint32 i = 0; i < 4; ++i) {
            if (i < count) {
                master[at + i] = last[i];
                if (copy != nullptr) {
                    copy[at + i] = to_bf16(last[i]);
                }
            }
        }
    }
};

// table [parameters], one CTA per chunk; coefficients [1].
extern "C" __global__ void __launch_bounds__(kChunkThreads)
    adamw_fp8(const Parameter* __restrict__ table, uint32 parameters,
              const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 chunk = blockIdx.x;
    const Parameter p = table[adamw_parameter_of(table, parameters, chunk)];
    adamw_fp8_chunk(p.gradient, p.first_moment, p.second_moment, WideMasters{p.master, p.copy},
                    chunk - p.first_chunk, p.elements, p.index, adamw_decay(c, p.weight_decay), c);
}
