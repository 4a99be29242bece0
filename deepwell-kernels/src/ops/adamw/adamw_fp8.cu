// AdamW over a bucket of parameters in one launch, with moments in eight bits; otherwise as in
// `adamw.cu`. 16 bytes move per parameter: gradient, weight twice, and two codes twice.
//
// A warp has a block of 128 elements, so that a shuffle finds the scale of the new moments. Random
// bits of the rounding follow from the number of the step, the parameter and the element.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/adamw_fp8.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kQuad = 4;  // elements per thread
constexpr uint64 kChunk = kThreads * kQuad;

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

// Loads up to four numbers; the others are zero.
__device__ __forceinline__ float4 load_quad(const float* x, uint64 count) {
    if (count >= kQuad) {
        return *reinterpret_cast<const float4*>(x);
    }
    return make_float4(count > 0 ? x[0] : 0.0f, count > 1 ? x[1] : 0.0f, count > 2 ? x[2] : 0.0f,
                       0.0f);
}

// table [parameters], one CTA per chunk; coefficients [1].
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw_fp8(const Parameter* __restrict__ table, uint32 parameters,
              const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 chunk = blockIdx.x;
    const Parameter p = table[adamw_parameter_of(table, parameters, chunk)];
    const uint64 at = (chunk - p.first_chunk) * kChunk + threadIdx.x * kQuad;
    const uint64 block = at / kMomentBlock;
    if (block * kMomentBlock >= p.elements) {
        return;  // the whole warp
    }
    const uint64 count = at < p.elements ? p.elements - at : 0;
    const float decay = adamw_decay(c, p.weight_decay);
    const uint32 lane = threadIdx.x % 32;
    uint8* const first = p.first_moment + block * kMomentBlockBytes;
    uint8* const second = p.second_moment + block * kMomentBlockBytes;
    const float4 g = load_quad(p.gradient + at, count);
    float4 w = load_quad(p.master + at, count);
    float4 m = moment_decode(moment_load(first, lane));
    float4 v = moment_squares(moment_decode(moment_load(second, lane)));
    adamw_update(g, w, m, v, decay, c);
    moments_store(first, second, lane, m, v, at / kQuad, p.index, c.step);
    if (count >= kQuad) {
        *reinterpret_cast<float4*>(p.master + at) = w;
        if (p.copy != nullptr) {
            *reinterpret_cast<uint2*>(p.copy + at) =
                make_uint2(to_bf16_pair(w.x, w.y), to_bf16_pair(w.z, w.w));
        }
        return;
    }
    const float last[kQuad] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (uint32 i = 0; i < kQuad; ++i) {
        if (i < count) {
            p.master[at + i] = last[i];
            if (p.copy != nullptr) {
                p.copy[at + i] = to_bf16(last[i]);
            }
        }
    }
}
