// Selection biases for load balancing.
//
//   count_experts          counts[expert] (+)= occurrences of the expert in `chosen` [pairs], in
//                          FP32, exact up to 2^24
//   selection_bias_update  bias[expert] += rate for fewer choices than the mean, -= rate for more;
//                          a skipped step changes nothing
//
// Counts are whole numbers, so sums do not depend on the order. Each CTA counts a run of pairs, and
// the last CTA to arrive adds up the runs. Roofline: 4 bytes per pair; for the update 12 bytes per
// expert.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/types.cuh"
#include "layout/expert_parts.cuh"

constexpr uint32 kThreads = 256;

// partials [runs, experts], arrivals [1]. One CTA per run of `run` pairs, a multiple of four; at
// least one CTA. `across`: number of experts that the threads process at a time, a power of two.
extern "C" __global__ void __launch_bounds__(kThreads)
    count_experts(const int32* __restrict__ chosen, float* counts, uint32* partials,
                  uint32* arrivals, uint32 pair_count, uint32 experts, uint32 run, uint32 across,
                  uint32 accumulate) {
    const Parts<kThreads> parts(across);
    const Segment segment(parts, pair_count, run);
    for (uint32 first = 0; first < experts; first += across) {
        const uint32 expert = first + parts.expert;
        uint32 count = 0;
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32) { ++count; });
        const uint32 all = sum_of_parts(parts, count).all;
        if (parts.part == 0 && expert < experts) {
            partials[uint64{blockIdx.x} * experts + expert] = all;
        }
    }
    if (!is_last_cta(arrivals, gridDim.x)) {
        return;
    }
    for (uint32 first = 0; first < experts; first += across) {
        const uint32 expert = first + parts.expert;
        uint32 count = 0;
        for (uint32 of_run = parts.part; expert < experts && of_run < gridDim.x;
             of_run += parts.count) {
            count += __ldcg(partials + uint64{of_run} * experts + expert);
        }
        const uint32 all = sum_of_parts(parts, count).all;
        if (parts.part == 0 && expert < experts) {
            const float before = accumulate != 0 ? counts[expert] : 0.0f;
            counts[expert] = before + static_cast<float>(all);
        }
    }
}

// Runs in one CTA. coefficients [9], the first of which is 0 for a skipped step; counts, bias
// [experts].
extern "C" __global__ void __launch_bounds__(kThreads)
    selection_bias_update(const float* __restrict__ coefficients,
                          const float* __restrict__ counts, float* bias, uint32 experts,
                          float rate) {
    __shared__ uint64 totals[kThreads];
    if (coefficients[0] == 0.0f) {
        return;
    }
    uint64 total = 0;
    for (uint32 expert = threadIdx.x; expert < experts; expert += kThreads) {
        total += static_cast<uint64>(counts[expert]);
    }
    totals[threadIdx.x] = total;
    __syncthreads();
    total = 0;
    for (uint32 thread = 0; thread < kThreads; ++thread) {
        total += totals[thread];
    }
    for (uint32 expert = threadIdx.x; expert < experts; expert += kThreads) {
        // Compares the count with the mean, in whole numbers.
        const uint64 count = static_cast<uint64>(counts[expert]) * experts;
        const double step = count < total ? double{rate} : count > total ? -double{rate} : 0.0;
        bias[expert] = static_cast<float>(double{bias[expert]} + step);
    }
}
