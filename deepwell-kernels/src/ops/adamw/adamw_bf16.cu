// AdamW over a bucket of parameters with master weights in BF16, rounded stochastically; moments in
// FP32 (`adamw_bf16`) or in eight bits (`adamw_bf16_fp8`). Otherwise as in `adamw.cu` and
// `adamw_fp8.cu`. 24 bytes move per parameter, or 12: gradient, weight twice, both moments twice.
//
// The new weight is computed in FP32 and rounded with 16 random bits, which follow from the number
// of the step, the parameter and the element.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/adamw_bf16.cuh"
#include "layout/adamw_fp8_chunk.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kQuad = 4;  // elements per thread
constexpr uint64 kWideChunk = kThreads * kQuad;  // with moments in FP32

// A non-empty parameter of the list; pointers are 16-byte aligned.
template <typename Moment>
struct Parameter {
    const float* gradient;
    bf16* master;
    Moment* first_moment;
    Moment* second_moment;
    const bf16* copy;  // null: the master is what calls read
    uint64 elements;
    uint64 first_chunk;
    float weight_decay;
    uint32 index;  // among the parameters of the program
};

static_assert(sizeof(Parameter<float>) == 64, "the host writes this layout");

__device__ __forceinline__ void store_quad(float* x, const float4& values, uint64 count) {
    if (count >= kQuad) {
        *reinterpret_cast<float4*>(x) = values;
        return;
    }
    const float last[kQuad] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (uint32 i = 0; i < kQuad; ++i) {
        if (i < count) {
            x[i] = last[i];
        }
    }
}

// table [parameters], one CTA per chunk; coefficients [1].
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_bf16(const Parameter<float>* __restrict__ table, uint32 parameters,
               const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 chunk = blockIdx.x;
    const Parameter<float> p = table[adamw_parameter_of(table, parameters, chunk)];
    const uint64 at = (chunk - p.first_chunk) * kWideChunk + threadIdx.x * kQuad;
    if (at >= p.elements) {
        return;
    }
    const uint64 count = p.elements - at;
    const float4 g = load_quad(p.gradient + at, count);
    float4 w = master_widen(master_load(p.master + at, count));
    float4 m = load_quad(p.first_moment + at, count);
    float4 v = load_quad(p.second_moment + at, count);
    adamw_update(g, w, m, v, adamw_decay(c, p.weight_decay), c);
    store_quad(p.first_moment + at, m, count);
    store_quad(p.second_moment + at, v, count);
    master_store(p.master + at, w, count, at / kQuad, p.index, c.step);
}

struct NarrowMasters {
    using Stored = uint2;
    bf16* master;

    __device__ __forceinline__ uint2 load(uint64 at, uint64 count) const {
        return master_load(master + at, count);
    }
    static __device__ __forceinline__ float4 widen(const uint2& w) { return master_widen(w); }
    __device__ __forceinline__ void store(uint64 at, const float4& w, uint64 count, uint32 index,
                                          float step) const {
        master_store(master + at, w, count, at / 4, index, step);
    }
};

// The same with moments in blocks of 128 elements.
extern "C" __global__ void __launch_bounds__(kChunkThreads)
    adamw_bf16_fp8(const Parameter<uint8>* __restrict__ table, uint32 parameters,
                   const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 chunk = blockIdx.x;
    const Parameter<uint8> p = table[adamw_parameter_of(table, parameters, chunk)];
    adamw_fp8_chunk(p.gradient, p.first_moment, p.second_moment, NarrowMasters{p.master},
                    chunk - p.first_chunk, p.elements, p.index, adamw_decay(c, p.weight_decay), c);
}
