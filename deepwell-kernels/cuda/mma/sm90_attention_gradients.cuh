// Attention gradients on wgmma: weights and score gradients with statistics by row or by column,
// and staging of results.
//
// A warpgroup holds 64 rows of scores, of keys or of queries, in the layout of ptx/wgmma.cuh. With
// p = 2^(scale_log2 score - lse) and dp = dout v^T: ds = p (dp - delta).
#pragma once

#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/exp2.cuh"
#include "ptx/wgmma_bf16.cuh"

namespace sm90_attention {

// Reads this thread's columns of statistics in shared memory: of each group of eight columns,
// 2 (lane % 4) and the next. Reads that precede a wait for wgmma are overlapped with the wgmma,
// which leave little bandwidth of shared memory.
template <int kEights>
__device__ __forceinline__ void read_columns(float2 (&values)[kEights], const float* statistics) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
        values[eight] =
            *reinterpret_cast<const float2*>(statistics + 8 * eight + threadIdx.x % 4 * 2);
    }
}

// Turns scores into p; lse (in powers of two) by column.
template <int kCount>
__device__ __forceinline__ void weigh_columns(float (&scores)[kCount],
                                              const float2 (&lse_log2)[kCount / 4],
                                              float scale_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float2 lse = lse_log2[i / 4];
        scores[i] = ex2(fmaf(scores[i], scale_log2, i % 2 == 0 ? -lse.x : -lse.y));
    }
}

// Turns dp into ds; delta by column.
template <int kCount>
__device__ __forceinline__ void differentiate_columns(float (&dp)[kCount],
                                                      const float (&p)[kCount],
                                                      const float2 (&deltas)[kCount / 4]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        const float2 delta = deltas[i / 4];
        dp[i] = p[i] * (dp[i] - (i % 2 == 0 ? delta.x : delta.y));
    }
}

// The same with lse and delta of this thread's two rows.
template <int kCount>
__device__ __forceinline__ void weigh_rows(float (&scores)[kCount], const float (&lse_log2)[2],
                                           float scale_log2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        scores[i] = ex2(fmaf(scores[i], scale_log2, -lse_log2[i % 4 / 2]));
    }
}

template <int kCount>
__device__ __forceinline__ void differentiate_rows(float (&dp)[kCount], const float (&p)[kCount],
                                                   const float (&delta)[2]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        dp[i] = p[i] * (dp[i] - delta[i % 4 / 2]);
    }
}

// Writes `scale` times the accumulators of 64 rows to shared memory at `staged`: of this thread's
// two rows to the rows `rows`.
template <typename Rows, int kCount>
__device__ __forceinline__ void stage_rows(uint8* staged, const float (&sums)[kCount],
                                           float scale, const uint32 (&rows)[2]) {
#pragma unroll
    for (int unit = 0; unit < kCount / 4; ++unit) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            *reinterpret_cast<uint32*>(staged + Rows::offset(rows[half], unit) +
                                       threadIdx.x % 4 * 4) =
                to_bf16_pair(sums[4 * unit + 2 * half] * scale,
                             sums[4 * unit + 2 * half + 1] * scale);
        }
    }
}

// This thread's first row of accumulators; the second is eight rows further.
__device__ __forceinline__ uint32 accumulator_row() {
    return threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
}

// The same to the rows of the accumulators.
template <typename Rows, int kCount>
__device__ __forceinline__ void stage_rows(uint8* staged, const float (&sums)[kCount],
                                           float scale) {
    const uint32 row = accumulator_row();
    stage_rows<Rows>(staged, sums, scale, {row, row + 8});
}

template <int kCount>
__device__ __forceinline__ void set_zero(float (&sums)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        sums[i] = 0.0f;
    }
}

}  // namespace sm90_attention
