// FP32 results of attention to a part of the keys.
#pragma once

#include "common/types.cuh"
#include "mma/sm90_attention_tile.cuh"

namespace sm90_attention {

// Rows [batch, rows, heads, D] of results.
struct PartRows {
    float* first;      // row 0 of the first sequence
    int32 rows;        // of a sequence
    uint32 all_rows;   // from a sequence to the next
    uint32 heads;
    uint32 head_dim;

    // Stores `scale` times this thread's accumulators of half `half` as part of row `row` of a
    // head, if there is such a row. A quad of lanes stores 32 contiguous bytes, a sector of the L2
    // cache.
    template <int kCount>
    __device__ __forceinline__ void store_row(const float (&sums)[kCount], int half, float scale,
                                              int32 row, uint32 head, uint32 batch) const {
        if (row >= rows) {
            return;
        }
        const uint64 token = static_cast<uint64>(batch) * all_rows + row;
        float* to = first + (token * heads + head) * head_dim + threadIdx.x % 4 * 2;
#pragma unroll
        for (int unit = 0; unit < kCount / 4; ++unit) {
            if (8 * unit < head_dim) {
                *reinterpret_cast<float2*>(to + 8 * unit) =
                    make_float2(sums[4 * unit + 2 * half] * scale,
                                sums[4 * unit + 2 * half + 1] * scale);
            }
        }
    }

    // The same for the accumulators of 64 rows, from row `row` on.
    template <int kCount>
    __device__ __forceinline__ void store(const float (&sums)[kCount], float scale, int32 row,
                                          uint32 head, uint32 batch) const {
        const int32 own = row + threadIdx.x % kWarpgroup / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            store_row(sums, half, scale, own + 8 * half, head, batch);
        }
    }
};

}  // namespace sm90_attention
