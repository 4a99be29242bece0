// From sums of wgmma in registers to an FP32 result in device memory by tensor copies: a warp puts
// its 16 rows of 128 columns into shared memory and has them copied from there while it goes on.
#pragma once

#include "common/types.cuh"
#include "ptx/elect.cuh"
#include "ptx/shared_store.cuh"
#include "ptx/tensor_copy_4d.cuh"

// Of a warp: a part for each 32 columns, 16 rows of one swizzle each.
constexpr uint32 kStagedPartBytes = 16 * 128;
constexpr int kStagedRowsBytes = 4 * kStagedPartBytes;

// The calling warp's 16 rows, from (row, column) of matrix `group` on; `sums` as ptx/wgmma.cuh has
// them. `out` is [groups, columns / 32, rows, 32] in boxes of [1, 4, 16, 32], swizzled by 128
// bytes; what lies beyond it is left out. `staged` has `kStagedRowsBytes` for this warp alone, from
// a multiple of 1024 on; what this warp had copied from there before is waited for.
__device__ __forceinline__ void tensor_store_wgmma_rows(const TensorMap& out, uint32 group,
                                                        uint32 row, uint32 column,
                                                        const float (&sums)[64], uint8* staged) {
    const uint32 lane = threadIdx.x % 32;
    const bool copies = elect_one();
    if (copies) {
        tensor_store_wait_read();
    }
    __syncwarp();
    // Half of a warp writes two units of 16 bytes in each of four rows. Swizzled, those of a row
    // and the next lie in the same banks: odd rows begin two times eight columns further on.
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
