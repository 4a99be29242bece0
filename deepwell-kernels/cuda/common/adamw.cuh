// AdamW update of one weight, and lookup of the parameter that an element belongs to.
#pragma once

#include "common/types.cuh"

// Coefficients shared by all elements of a step, in the order that the op documents.
struct AdamwCoefficients {
    float step;  // from 1; 0 where the norm is infinite or NaN and the step is skipped
    float learning_rate;
    float clip;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;
    float root_correction;
    float eps;
};

static_assert(sizeof(AdamwCoefficients) == 36, "nine numbers");

// Returns the factor of weight decay, 1 - learning_rate * weight_decay.
__device__ __forceinline__ float adamw_decay(const AdamwCoefficients& c, float weight_decay) {
    const double learning_rate = c.learning_rate;
    return static_cast<float>(
        __dsub_rn(1.0, __dmul_rn(learning_rate, static_cast<double>(weight_decay))));
}

// The new moments of a weight. Every operation is rounded separately, as on the CPU.
__device__ __forceinline__ void adamw_moments(float gradient, float& m, float& v,
                                              const AdamwCoefficients& c) {
    const float g = __fmul_rn(gradient, c.clip);
    m = __fadd_rn(m, __fmul_rn(c.one_minus_beta1, __fsub_rn(g, m)));
    v = __fadd_rn(__fmul_rn(c.beta2, v), __fmul_rn(c.one_minus_beta2, __fmul_rn(g, g)));
}

__device__ __forceinline__ float adamw_denominator(float root, const AdamwCoefficients& c) {
    return __fadd_rn(__fmul_rn(root, c.root_correction), c.eps);
}

__device__ __forceinline__ float adamw_weight(float w, float quotient, float decay,
                                              const AdamwCoefficients& c) {
    return __fsub_rn(__fmul_rn(w, decay), __fmul_rn(c.step_size, quotient));
}

__device__ __forceinline__ void adamw_update(float gradient, float& w, float& m, float& v,
                                             float decay, const AdamwCoefficients& c) {
    adamw_moments(gradient, m, v, c);
    const float denominator = adamw_denominator(__fsqrt_rn(v), c);
    w = adamw_weight(w, __fdiv_rn(m, denominator), decay, c);
}

__device__ __forceinline__ void adamw_update(const float4& g, float4& w, float4& m, float4& v,
                                             float decay, const AdamwCoefficients& c) {
    adamw_update(g.x, w.x, m.x, v.x, decay, c);
    adamw_update(g.y, w.y, m.y, v.y, decay, c);
    adamw_update(g.z, w.z, m.z, v.z, decay, c);
    adamw_update(g.w, w.w, m.w, v.w, decay, c);
}

// Returns the index of the last parameter of `table` whose first chunk is at most `chunk`.
template <typename Parameter>
__device__ __forceinline__ uint32 adamw_parameter_of(const Parameter* __restrict__ table,
                                                     uint32 parameters, uint64 chunk) {
    uint32 begin = 0, end = parameters;
    while (end - begin > 1) {
        const uint32 middle = begin + (end - begin) / 2;
        if (table[middle].first_chunk <= chunk) {
            begin = middle;
        } else {
            end = middle;
        }
    }
    return begin;
}
