// A router's expert scores for one token, computed by a warp in FP64: `deepwell_moe::score_row`.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ double sum_of_warp_f64(double value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    return value;
}

// Writes the softmax of one row of logits; each lane handles every 32nd expert. Returns the
// logarithm of the sum of the exponentials. NaN or infinite logits give NaN.
__device__ __forceinline__ double token_softmax(const float* __restrict__ logits, uint32 experts,
                                                double* scores) {
    const uint32 lane = threadIdx.x % 32;
    // Subtracting the largest logit prevents overflow of the exponentials. NaN is never larger.
    float largest = __uint_as_float(0xff800000u);
    for (uint32 expert = lane; expert < experts; expert += 32) {
        largest = fmaxf(largest, logits[expert]);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    double sum = 0.0;
    for (uint32 expert = lane; expert < experts; expert += 32) {
        const double power = exp(double{logits[expert]} - double{largest});
        scores[expert] = power;
        sum += power;
    }
    sum = sum_of_warp_f64(sum);
    for (uint32 expert = lane; expert < experts; expert += 32) {
        scores[expert] /= sum;
    }
    return double{largest} + log(sum);
}

// Writes the scores, softmax or sigmoid.
__device__ __forceinline__ void token_scores(const float* __restrict__ logits, uint32 experts,
                                             uint32 is_sigmoid, double* scores) {
    if (!is_sigmoid) {
        token_softmax(logits, experts, scores);
        return;
    }
    for (uint32 expert = threadIdx.x % 32; expert < experts; expert += 32) {
        scores[expert] = 1.0 / (1.0 + exp(-double{logits[expert]}));
    }
}
