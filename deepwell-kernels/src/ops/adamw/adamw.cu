// AdamW over a bucket of parameters in one launch, with clipping by the gradients' norm. A step
// whose norm is not finite changes only the count of skipped steps.
//
// Per element, with g = gradient * clip, t the number of the step from 1:
//
//     m = m + (1 - beta1) (g - m)
//     v = beta2 v + (1 - beta2) g^2
//     w = w (1 - rate decay) - rate / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//
// Every operation is rounded separately, as on the CPU, so that both give the same bits (the
// coefficients, computed in FP64, may differ in their last bit). 28 bytes move per parameter: four
// numbers are read and three written; a BF16 copy of the new weight adds two bytes. The parameters
// form one list of chunks of 1024 elements. Each chunk has its own CTA, with four elements per
// thread: new CTAs that start as others end keep the memory busier than persistent CTAs that loop
// over chunks (99 % of memcpy bandwidth on an H200 instead of 88 %). A preceding kernel computes
// the coefficients that all buckets share.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kQuad = 4;  // elements per thread
constexpr uint64 kChunk = kThreads * kQuad;

// A non-empty parameter of the list; the first four pointers are 16-byte aligned.
struct Parameter {
    const float* gradient;
    float* master;
    float* first_moment;
    float* second_moment;
    bf16* copy;  // BF16 weights; 8-byte aligned, null if absent
    uint64 elements;
    uint64 first_chunk;
    float weight_decay;
    uint32 index;  // unused: moments in FP32 are not rounded stochastically
};

static_assert(sizeof(Parameter) == 64, "the host writes this layout");

// Computes the coefficients of a step and counts the step, in one thread. grad_norm [1], schedule
// [2] (learning rate, largest norm), counters [2] (applied steps, skipped steps).
//
// With sums of squares [sum_count] the coefficients are for one bucket: the norm is the last step's
// and clips only if it is finite, a sum that is not finite skips the bucket, and the step is not
// counted.
extern "C" __global__ void __launch_bounds__(32)
    adamw_coefficients(const float* __restrict__ grad_norm, const float* __restrict__ schedule,
                       uint64* counters, float beta1, float beta2, float eps,
                       AdamwCoefficients* coefficients, const double* __restrict__ sums,
                       uint32 sum_count) {
    if (threadIdx.x > 0) {
        return;
    }
    bool is_finite = fabsf(*grad_norm) < __uint_as_float(0x7f800000u);
    const double norm = sums != nullptr && !is_finite ? 0.0 : *grad_norm;
    if (sums != nullptr) {
        is_finite = true;
        for (uint32 i = 0; i < sum_count; ++i) {
            is_finite &= sums[i] < __longlong_as_double(0x7ff0000000000000ll);
        }
    }
    const double learning_rate = schedule[0];
    const double norm_max = schedule[1];
    const double wide_beta1 = beta1;
    const double wide_beta2 = beta2;
    const double t = static_cast<double>(counters[0] + 1);
    AdamwCoefficients c;
    c.step = is_finite ? static_cast<float>(t) : 0.0f;
    c.learning_rate = schedule[0];
    c.clip = static_cast<float>(fmin(norm_max / (norm + 1e-6), 1.0));
    c.one_minus_beta1 = static_cast<float>(1.0 - wide_beta1);
    c.beta2 = beta2;
    c.one_minus_beta2 = static_cast<float>(1.0 - wide_beta2);
    c.step_size = static_cast<float>(learning_rate / (1.0 - pow(wide_beta1, t)));
    c.root_correction = static_cast<float>(1.0 / sqrt(1.0 - pow(wide_beta2, t)));
    c.eps = eps;
    *coefficients = c;
    if (sums == nullptr) {
        counters[is_finite ? 0 : 1] += 1;
    }
}

// table [parameters], one CTA per chunk; coefficients [1].
extern "C" __global__ void __launch_bounds__(kThreads)
    adamw(const Parameter* __restrict__ table, uint32 parameters,
          const AdamwCoefficients* __restrict__ coefficients) {
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
        return;
    }
    const uint64 chunk = blockIdx.x;
    const Parameter p = table[adamw_parameter_of(table, parameters, chunk)];
    const uint64 at = (chunk - p.first_chunk) * kChunk + threadIdx.x * kQuad;
    const float decay = adamw_decay(c, p.weight_decay);
    if (at + kQuad <= p.elements) {
        const float4 g = *reinterpret_cast<const float4*>(p.gradient + at);
        float4 w = *reinterpret_cast<const float4*>(p.master + at);
        float4 m = *reinterpret_cast<const float4*>(p.first_moment + at);
        float4 v = *reinterpret_cast<const float4*>(p.second_moment + at);
        adamw_update(g, w, m, v, decay, c);
        *reinterpret_cast<float4*>(p.master + at) = w;
        *reinterpret_cast<float4*>(p.first_moment + at) = m;
        *reinterpret_cast<float4*>(p.second_moment + at) = v;
        if (p.copy != nullptr) {
            *reinterpret_cast<uint2*>(p.copy + at) =
                make_uint2(to_bf16_pair(w.x, w.y), to_bf16_pair(w.z, w.w));
        }
        return;
    }
    // Not unrolled: unrolling would cost registers on the main path.
#pragma unroll 1
    for (uint64 i = at; i < p.elements; ++i) {
        float w = p.master[i];
        adamw_update(p.gradient[i], w, p.first_moment[i], p.second_moment[i], decay, c);
        p.master[i] = w;
        if (p.copy != nullptr) {
            p.copy[i] = to_bf16(w);
        }
    }
}
