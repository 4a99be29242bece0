// Root-mean-square normalization of each head of queries or keys:
//
//   rstd = 1 / sqrt(mean(x^2) + eps);  y = x * rstd * weight
//
// x, y [heads, head_dim] BF16, with the heads of all tokens contiguous; weight [head_dim]; rstd
// [heads] FP32. A head belongs to a few lanes of a warp, so it is read once, in units of 16 bytes,
// and a warp reads and writes whole lines. Heads that are not whole units or have more than 256
// elements are processed as rows by rms_norm.cu.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/head_group.cuh"
#include "layout/norm_value.cuh"

constexpr int kThreads = 256;
// Heads per thread.
constexpr int kHeads = 4;

// head_dim a multiple of 8, at most 8 * lanes; lanes a power of two, at most 32. A CTA normalizes
// kThreads / lanes * kHeads heads.
extern "C" __global__ void __launch_bounds__(kThreads)
    head_rms_norm(const uint4* __restrict__ x, const uint4* __restrict__ weight,
                  uint4* __restrict__ y, float* __restrict__ rstd, uint32 heads, uint32 head_dim,
                  uint32 lanes, float eps) {
    const HeadGroup<kThreads, kHeads> group(head_dim, lanes);
    const uint32 first = blockIdx.x * group.heads_at_a_time();
    uint4 packed[kHeads], gain = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        const uint32 head = group.head(first, k);
        packed[k] = make_uint4(0, 0, 0, 0);
        if (group.holds_a_vector() && head < heads) {
            packed[k] = x[group.vector_of(head)];
        }
    }
    if (group.holds_a_vector()) {
        gain = weight[group.lane];
    }
    float squares[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        float values[8];
        unpack_bf16x8(packed[k], values);
        squares[k] = sum_of_squares(values);
    }
    group.sum(squares);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        const uint32 head = group.head(first, k);
        if (group.holds_a_vector() && head < heads) {
            const float scale = rms_rstd(squares[k], head_dim, eps);
            y[group.vector_of(head)] = rms_normalized(packed[k], scale, gain);
            if (group.lane == 0) {
                rstd[head] = scale;
            }
        }
    }
}
