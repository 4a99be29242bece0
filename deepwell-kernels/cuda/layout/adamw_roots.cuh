// AdamW of four weights with fewer instructions, to the bits of `adamw.cuh`: one check for the
// range of all numbers in place of one for each root and quotient. Kernels whose moments have eight
// bits are bound by instructions; those with moments in FP32, by memory.
#pragma once

#include "common/adamw.cuh"
#include "common/types.cuh"
#include "ptx/approximate.cuh"

// The root rounded to nearest, of numbers in `adamw_is_plain`: the fast path of `__fsqrt_rn`,
// which checks each number.
__device__ __forceinline__ float adamw_plain_root(float x) {
    const float reciprocal = rsqrt_approx(x);
    const float root = __fmul_rn(x, reciprocal);
    const float residual = __fmaf_rn(-root, root, x);
    return __fmaf_rn(residual, __fmul_rn(reciprocal, 0.5f), root);
}

// The quotient rounded to nearest, likewise the fast path of `__fdiv_rn`.
__device__ __forceinline__ float adamw_plain_quotient(float a, float b) {
    const float estimate = rcp_approx(b);
    const float reciprocal = __fmaf_rn(estimate, __fmaf_rn(-b, estimate, 1.0f), estimate);
    const float quotient = __fmul_rn(a, reciprocal);
    return __fmaf_rn(reciprocal, __fmaf_rn(-b, quotient, a), quotient);
}

// Twice the bits of a magnitude, less those of a power of two.
__device__ __forceinline__ uint32 adamw_above(float x, int exponent) {
    return 2 * __float_as_uint(x) - (static_cast<uint32>(127 + exponent) << 24);
}

// Whether roots of second moments are in [2^-50, 2^30] and magnitudes of first moments in
// [2^-70, 2^10]. With `adamw_takes_plain`, quotients and residuals are normal numbers.
__device__ __forceinline__ bool adamw_is_plain(const float4& root, const float4& m) {
    constexpr uint32 kWidth = 80u << 24;
    const uint32 of_roots = max(max(adamw_above(root.x, -50), adamw_above(root.y, -50)),
                                max(adamw_above(root.z, -50), adamw_above(root.w, -50)));
    const uint32 of_moments = max(max(adamw_above(m.x, -70), adamw_above(m.y, -70)),
                                  max(adamw_above(m.z, -70), adamw_above(m.w, -70)));
    return max(of_roots, of_moments) <= kWidth;
}

// Whether denominators of plain roots are in [2^-50, 2^51].
__device__ __forceinline__ bool adamw_takes_plain(const AdamwCoefficients& c) {
    return c.root_correction >= 1.0f && c.root_correction <= 0x1p20f && c.eps >= 0.0f &&
           c.eps <= 0x1p20f;
}

// Updates four weights; returns the roots of the new second moments.
__device__ __forceinline__ float4 adamw_update_with_roots(const float4& g, float4& w, float4& m,
                                                          float4& v, float decay,
                                                          const AdamwCoefficients& c) {
    adamw_moments(g.x, m.x, v.x, c);
    adamw_moments(g.y, m.y, v.y, c);
    adamw_moments(g.z, m.z, v.z, c);
    adamw_moments(g.w, m.w, v.w, c);
    float4 root = make_float4(adamw_plain_root(v.x), adamw_plain_root(v.y), adamw_plain_root(v.z),
                              adamw_plain_root(v.w));
    float4 quotient;
    if (adamw_is_plain(root, m) && adamw_takes_plain(c)) {
        quotient = make_float4(adamw_plain_quotient(m.x, adamw_denominator(root.x, c)),
                               adamw_plain_quotient(m.y, adamw_denominator(root.y, c)),
                               adamw_plain_quotient(m.z, adamw_denominator(root.z, c)),
                               adamw_plain_quotient(m.w, adamw_denominator(root.w, c)));
    } else {
        root.x = __fsqrt_rn(v.x);
        quotient.x = __fdiv_rn(m.x, adamw_denominator(root.x, c));
        root.y = __fsqrt_rn(v.y);
        quotient.y = __fdiv_rn(m.y, adamw_denominator(root.y, c));
        root.z = __fsqrt_rn(v.z);
        quotient.z = __fdiv_rn(m.z, adamw_denominator(root.z, c));
        root.w = __fsqrt_rn(v.w);
        quotient.w = __fdiv_rn(m.w, adamw_denominator(root.w, c));
    }
    w = make_float4(adamw_weight(w.x, quotient.x, decay, c),
                    adamw_weight(w.y, quotient.y, decay, c),
                    adamw_weight(w.z, quotient.z, decay, c),
                    adamw_weight(w.w, quotient.w, decay, c));
    return root;
}
