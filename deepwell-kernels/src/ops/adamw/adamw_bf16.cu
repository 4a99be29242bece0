// AdamW over a bucket of parameters with master weights in BF16, rounded stochastically; moments in
// FP32 (`adamw_bf16`) or in eight bits (`adamw_bf16_fp8`). Otherwise as in `adamw.cu` and
// `adamw_fp8.cu`. 24 bytes move per parameter, or 12: gradient, weight twice, both moments twice.
//
// A thread has four elements. The new weight is computed in FP32 and rounded with 16 random bits,
// which follow from the number of the step, the parameter and the element.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/adamw_bf16.cuh"
#include "common/adamw_fp8.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kQuad = 4;  // elements per thread
constexpr uint64 kChunk = kThreads * kQuad;

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

// Loads up to four numbers; the others are zero.
__device__ __forceinline__ float4 load_quad(const float* x, uint64 count) {
    if (count >= kQuad) {
        return *reinterpret_cast<const float4*>(x);
    }
    return make_float4(count > 0 ? x[0] : 0.0f, count > 1 ? x[1] : 0.0f, count > 2 ? x[2] : 0.0f,
                       0.0f);
}

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
    const uint64 at = (chunk - p.first_chunk) * kChunk + threadIdx.x * kQuad;
    if (at >= p.elements) {
        return;
    }
    const uint64 count = p.elements - at;
    const float4 g = load_quad(p.gradient + at, count);
    float4 w = master_load(p.master + at, count);
    float4 m = load_quad(p.first_moment + at, count);
    float4 v = load_quad(p.second_moment + at, count);
    adamw_update(g, w, m, v, adamw_decay(c, p.weight_decay), c);
    store_quad(p.first_moment + at, m, count);
    store_quad(p.second_moment + at, v, count);
    master_store(p.master + at, w, count, at / kQuad, p.index, c.step);
}

// The same with moments in blocks of 128 elements, one for each warp.
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_bf16_fp8(const Parameter<uint8>* __restrict__ table, uint32 parameters,
                   const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 chunk = blockIdx.x;
    const Parameter<uint8> p = table[adamw_parameter_of(table, parameters, chunk)];
    const uint64 at = (chunk - p.first_chunk) * kChunk + threadIdx.x * kQuad;
    const uint64 block = at / kMomentBlock;
    if (block * kMomentBlock >= p.elements) {
        return;  // the whole warp
    }
    const uint64 count = at < p.elements ? p.elements - at : 0;
    const uint32 lane = threadIdx.x % 32;
    uint8* const first = p.first_moment + block * kMomentBlockBytes;
    uint8* const second = p.second_moment + block * kMomentBlockBytes;
    const float4 g = load_quad(p.gradient + at, count);
    float4 w = master_load(p.master + at, count);
    float4 m = moment_decode(moment_load(first, lane));
    float4 v = moment_squares(moment_decode(moment_load(second, lane)));
    adamw_update(g, w, m, v, adamw_decay(c, p.weight_decay), c);
    moments_store(first, second, lane, m, v, at / kQuad, p.index, c.step);
    master_store(p.master + at, w, count, at / kQuad, p.index, c.step);
}
