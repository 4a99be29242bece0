// Parts of attention on wgmma: pipeline stages and turns of warpgroups, GEMMs of rows of heads, and
// softmax of the scores of a warpgroup.
//
// A warpgroup has 64 queries. Scores and sums have the layout of ptx/wgmma.cuh: each thread holds
// two rows, lane / 4 and lane / 4 + 8 of its warp's 16.
#pragma once

#include "common/infinity.cuh"
#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "ptx/barrier.cuh"
#include "ptx/exp2.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma_bf16.cuh"

namespace sm90_attention {

constexpr int kWarpgroup = 128;  // threads
constexpr int kWaveM = 64;       // rows of a wgmma
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLeast = -3.4028234663852886e38f;

// Index of a pipeline stage, and the phase of its barriers.
template <int kStages>
struct Stage {
    uint32 index = 0;
    uint32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kStages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// Returns a stage to the producer, by each consumer warp.
__device__ __forceinline__ void release(uint64* empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(empty);
    }
}

// Consumers take turns in issuing wgmma, beginning with consumer 0.
template <int kConsumers>
class Turn {
    static constexpr uint32 kFirstBarrier = 1;
    static constexpr uint32 kBothThreads = 2 * kWarpgroup;
    uint32 consumer_;

  public:
    __device__ __forceinline__ explicit Turn(uint32 consumer) : consumer_(consumer) {
        if (consumer_ == static_cast<uint32>(kConsumers) - 1) {
            pass();
        }
    }

    __device__ __forceinline__ void await() const {
        barrier_sync(kFirstBarrier + consumer_, kBothThreads);
    }

    __device__ __forceinline__ void pass() const {
        const uint32 next = consumer_ + 1 == kConsumers ? 0 : consumer_ + 1;
        barrier_arrive(kFirstBarrier + next, kBothThreads);
    }

    // Consumes the last pass of the last consumer.
    __device__ __forceinline__ void end() const {
        if (consumer_ == 0) {
            await();
        }
    }
};

// Barrier of all threads of a consumer.
template <int kConsumers>
__device__ __forceinline__ void synchronize_warpgroup(uint32 consumer) {
    barrier_sync(1 + kConsumers + consumer, kWarpgroup);
}

// Starts products = left right^T over all columns, as one wgmma group. `left` and `right` are
// `WgmmaRows::rows`.
template <typename Left, typename Right, int kCount>
__device__ __forceinline__ void start_products(float (&products)[kCount], const WgmmaMatrix& left,
                                               const WgmmaMatrix& right) {
    wgmma_bf16<false, false>(products, left.at(0), right.at(0));
#pragma unroll
    for (int step = 1; step < Left::kSteps; ++step) {
        wgmma_bf16<true, false>(products, left.at(Left::column_step(step)),
                                right.at(Right::column_step(step)));
    }
    wgmma_commit();
}

// The same with the left rows in registers.
template <typename Right, int kCount, int kSteps>
__device__ __forceinline__ void start_products(float (&products)[kCount],
                                               const uint32 (&left)[kSteps][4],
                                               const WgmmaMatrix& right) {
    wgmma_bf16<false, false>(products, left[0], right.at(0));
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
        wgmma_bf16<true, false>(products, left[step], right.at(Right::column_step(step)));
    }
    wgmma_commit();
}

// Starts sums += weights rows, as one wgmma group; `rows` is a `WgmmaRows::columns`.
template <typename Rows, int kCount, int kSteps>
__device__ __forceinline__ void start_weighted_sums(float (&sums)[kCount],
                                                    const uint32 (&weights)[kSteps][4],
                                                    const WgmmaMatrix& rows) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        wgmma_bf16<true, true>(sums, weights[step], rows.at(Rows::row_step(step)));
    }
    wgmma_commit();
}

// Converts results of 64 rows to a left operand.
template <int kSteps>
__device__ __forceinline__ void to_left(uint32 (&left)[kSteps][4],
                                        const float (&values)[8 * kSteps]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            left[step][word] = to_bf16_pair(values[8 * step + 2 * word],
                                            values[8 * step + 2 * word + 1]);
        }
    }
}

// Sets scores of masked columns to -infinity. Row `half` sees the first `seen[half]` columns.
template <int kCount>
__device__ __forceinline__ void mask(float (&scores)[kCount], const int32 (&seen)[2]) {
    const int32 column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32 seen_here = seen[half] - column;
#pragma unroll
        for (int eight = 0; eight < kCount / 4; ++eight) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * eight + e >= seen_here) {
                    scores[4 * eight + 2 * half + e] = minus_infinity();
                }
            }
        }
    }
}

// The same where row `half` sees all except the first `passed[half]` columns.
template <int kCount>
__device__ __forceinline__ void mask_first(float (&scores)[kCount], const int32 (&passed)[2]) {
    const int32 column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int32 passed_here = passed[half] - column;
#pragma unroll
        for (int eight = 0; eight < kCount / 4; ++eight) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                if (8 * eight + e < passed_here) {
                    scores[4 * eight + 2 * half + e] = minus_infinity();
                }
            }
        }
    }
}

// Limit, in powers of two, by which a scaled score may exceed the reference of its row. FP32 sums
// lose no precision within it. After the first keys the limit is rarely exceeded, which saves
// nearly all rescaling and the exchange of maxima between lanes.
constexpr float kMargin = 8.0f;

// Online softmax of this thread's two rows, in powers of two. References are raised to the maximum
// scores of their rows only if any score of the warp exceeds its reference by more than the margin.
struct Softmax {
    float reference[2] = {kLeast, kLeast};  // scaled; finite
    float sum[2] = {0.0f, 0.0f};            // of this thread's weights, 2^(scaled - reference)

    // Turns scores into weights relative to the references. Returns whether the references were
    // raised: then the sums so far must be multiplied by `factors`.
    template <int kCount>
    __device__ __forceinline__ bool weigh(float (&scores)[kCount], float (&factors)[2],
                                          float scale_log2) {
        float tops[2];
        bool exceeds = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            tops[half] = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
            for (int eight = 1; eight < kCount / 4; ++eight) {
                tops[half] = fmaxf(tops[half], fmaxf(scores[4 * eight + 2 * half],
                                                     scores[4 * eight + 2 * half + 1]));
            }
            exceeds |= fmaf(tops[half], scale_log2, -kMargin) > reference[half];
            factors[half] = 1.0f;
        }
        const bool moves = __any_sync(0xffffffffu, exceeds);
        if (moves) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = tops[half];
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
                const float raised = fmaxf(top * scale_log2, reference[half]);
                factors[half] = ex2(reference[half] - raised);
                reference[half] = raised;
            }
        }
        // Two independent chains of additions.
        float parts[2][2] = {{0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll
        for (int eight = 0; eight < kCount / 4; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& score = scores[4 * eight + i];
                score = ex2(fmaf(score, scale_log2, -reference[i / 2]));
                parts[i / 2][i % 2] += score;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sum[half] = fmaf(sum[half], factors[half], parts[half][0] + parts[half][1]);
        }
        return moves;
    }

    // Sum of all weights of a row.
    __device__ __forceinline__ float whole_sum(int half) const {
        float whole = sum[half];
        whole += __shfl_xor_sync(0xffffffffu, whole, 1);
        whole += __shfl_xor_sync(0xffffffffu, whole, 2);
        return whole;
    }
};

// Multiplies the sums of row `half` by `factors[half]`.
template <int kCount>
__device__ __forceinline__ void scale_rows(float (&sums)[kCount], const float (&factors)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        sums[i] *= factors[i % 4 / 2];
    }
}

}  // namespace sm90_attention
