// Stores wgmma accumulators from registers to an FP32 result in global memory by TMA: a warp writes
// its 16 rows of 128 columns to shared memory and continues while they are copied.
#pragma once

#include "common/types.cuh"
#include "ptx/elect.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/tensor_copy_4d.cuh"

// Per warp: a part for each 32 columns, 16 rows of one swizzle each.
constexpr uint32 kStagedPartBytes = 16 * 128;
constexpr int kStagedRowsBytes = 4 * kStagedPartBytes;

// Stores the calling warp's 16 rows, from (row, column) of matrix `group` on; `sums` in the layout
// of ptx/wgmma.cuh. `out` is [groups, columns / 32, rows, 32] in boxes of [1, 4, 16, 32], 128-byte
// swizzle; elements beyond `out` are skipped. `staged` has `kStagedRowsBytes` for this warp alone,
// aligned to 1024; waits for the warp's previous copy from `staged`.
__device__ __forceinline__ void tensor_store_wgmma_rows(const TensorMap& out, uint32 group,
                                                        uint32 row, uint32 column,
                                                        const float (&sums)[64], uint8* staged) {
    const uint32 lane = threadIdx.x % 32;
    const bool copies = elect_one();
    if (copies) {
        tensor_store_wait_read();
    }
    __syncwarp();
    // A half-warp writes two 16-byte units in each of four rows. With the swizzle, the units of
    // neighboring rows would fall into the same banks, so odd rows start 16 columns further on.
    const bool is_odd = lane / 4 % 2 == 1;
    const uint32 unit = (lane % 4 / 2) ^ (lane / 4) ^ (is_odd ? 4 : 0);
    const uint32 own = static_cast<uint32>(__cvta_generic_to_shared(staged)) + lane / 4 * 128 +
                       unit * 16 + lane % 2 * 8;
#pragma unroll
    for (uint32 eight = 0; eight < 2; ++eight) {
        const uint32 first = own ^ eight * 32;
        const uint32 second = first ^ 64;
#pragma unroll
        for (uint32 part = 0; part < 4; ++part) {
#pragma unroll
            for (uint32 half = 0; half < 2; ++half) {
                const uint32 at = part * kStagedPartBytes + half * 8 * 128;
                const float* near = sums + (part * 4 + eight) * 4 + half * 2;
                const float* far = near + 2 * 4;
                shared_store_f32x2(first + at, is_odd ? far[0] : near[0],
                                   is_odd ? far[1] : near[1]);
                shared_store_f32x2(second + at, is_odd ? near[0] : far[0],
                                   is_odd ? near[1] : far[1]);
            }
        }
    }
    fence_before_copies();
    __syncwarp();
    if (copies) {
        tensor_store_4d(out, TensorPlace{{0, row, column / 32, group}}, staged);
        tensor_store_commit();
    }
}
