// First kernel of attention gradients: lse in powers of two, and delta, of each row of scores.
#pragma once

#include "common/bf16x8.cuh"
#include "common/infinity.cuh"
#include "common/types.cuh"
#include "mma/sm90_attention_backward_frame.cuh"

namespace sm90_attention {

constexpr int kStatisticsThreads = 256;

// Processes `kRows` rows of a head with `kLanes` lanes per row; the first `units` lanes hold 16
// bytes each. The grid has a CTA for each `kRows` of the padded rows of all heads. dout, out and
// lse have `seq` rows a sequence, of which the first `queries` are processed.
template <int kLanes, int kRows>
__device__ __forceinline__ void make_statistics(const bf16* dout, const bf16* out,
                                                const float* lse, const Statistics& statistics,
                                                uint32 queries, uint32 seq, uint32 heads,
                                                uint32 head_dim) {
    constexpr int kRowsAtOnce = kStatisticsThreads / kLanes;
    constexpr int kPasses = kRows / kRowsAtOnce;
    static_assert(kStatisticsRows % kRows == 0 && kRows % kRowsAtOnce == 0, "whole passes");
    const uint32 tiles = (queries + kStatisticsRows - 1) / kStatisticsRows;
    const uint32 parts = tiles * (kStatisticsRows / kRows);
    // Neighbouring CTAs have neighbouring heads, whose rows are contiguous in memory.
    const uint32 batch_part = blockIdx.x / heads;
    const uint32 head = blockIdx.x - batch_part * heads;
    const uint32 batch = batch_part / parts;
    const uint32 first_query = (batch_part - batch * parts) * kRows;
    const uint32 batch_head = batch * heads + head;
    const uint32 unit = threadIdx.x % kLanes;
    const uint32 units = head_dim / 8;
    uint4 out_words[kPasses];
    uint4 dout_words[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const uint32 query = first_query + pass * kRowsAtOnce + threadIdx.x / kLanes;
        out_words[pass] = dout_words[pass] = make_uint4(0, 0, 0, 0);
        if (unit < units && query < queries) {
            const uint64 token = static_cast<uint64>(batch) * seq + query;
            const uint64 at = (token * heads + head) * units + unit;
            out_words[pass] = reinterpret_cast<const uint4*>(out)[at];
            dout_words[pass] = reinterpret_cast<const uint4*>(dout)[at];
        }
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
        const uint32 query = first_query + pass * kRowsAtOnce + threadIdx.x / kLanes;
        float a[8], b[8];
        unpack_bf16x8(out_words[pass], a);
        unpack_bf16x8(dout_words[pass], b);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum = fmaf(a[i], b[i], sum);
        }
#pragma unroll
        for (int distance = kLanes / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (unit == 0) {
            const uint64 row = static_cast<uint64>(batch_head) * tiles * kStatisticsRows + query;
            const bool is_inside = query < queries;
            const uint64 source = static_cast<uint64>(batch_head) * seq + query;
            statistics.lse_log2[row] =
                is_inside ? lse[source] * kLog2E : -minus_infinity();
            statistics.delta[row] = sum;
        }
    }
}

}  // namespace sm90_attention
