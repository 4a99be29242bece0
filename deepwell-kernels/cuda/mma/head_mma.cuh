// Warp-level MMAs on rows of attention heads (layout/head_tile.cuh).
//
// Rows come in blocks of 16, with 16 elements of the head per step. Each ldmatrix loads a 16 x 16
// block of rows and elements, in one of two orders of its 8 x 8 quarters:
//   summed:  by rows first: a left operand, or, transposed by ldmatrix, a right operand whose rows
//            are contracted;
//   columns: by elements first: a right operand whose rows are columns of the result.
// In both orders words 0 and 1 of a right operand belong to the first eight columns of the result,
// and words 2 and 3 to the next eight. (mma.sync takes neighbouring registers; other orders cost
// moves.)
#pragma once

#include "common/types.cuh"
#include "layout/head_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"

// ldmatrix address of lane l for the first block of a tile: row l % 16, elements 0 to 7 (l < 16) or
// 8 to 15.
template <int kHeadDim>
__device__ __forceinline__ uint32 summed_address(uint32 tile, uint32 lane) {
    return tile + HeadTile<kHeadDim>::offset(lane % 16, lane / 16);
}

template <int kHeadDim>
__device__ __forceinline__ uint32 columns_address(uint32 tile, uint32 lane) {
    return tile + HeadTile<kHeadDim>::offset(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Address for rows 16 * row_block and elements 16 * step: the units of a step differ from those of
// step 0 only in the upper bits of their position in the row.
template <int kHeadDim>
__device__ __forceinline__ uint32 block_address(uint32 lane_address, int row_block, int step) {
    const uint32 row_bytes = row_block * 16 * HeadTile<kHeadDim>::kRowBytes;
    if constexpr (kHeadDim > 128) {
        // The row length is not a power of two: the rotation is within 128 bytes only.
        return (lane_address ^ (static_cast<uint32>(step % 4) << 5)) + step / 4 * 128 + row_bytes;
    }
    return (lane_address ^ (static_cast<uint32>(step) << 5)) + row_bytes;
}

// Loads all left operands of `kM` blocks of 16 rows; `rows` is a `summed_address`.
template <int kHeadDim, int kM>
__device__ __forceinline__ void load_left(uint32 (&left)[kM][kHeadDim / 16][4], uint32 rows) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int step = 0; step < kHeadDim / 16; ++step) {
            ldmatrix_x4(left[m][step], block_address<kHeadDim>(rows, m, step));
        }
    }
}

// One step of sums += left right^T; here and below `right_rows` is a `columns_address`.
template <int kHeadDim, int kM, int kN>
__device__ __forceinline__ void multiply_step(float (&sums)[kM][2 * kN][4],
                                              const uint32 (&left)[kM][4], uint32 right_rows,
                                              int step) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
        uint32 right[4];
        ldmatrix_x4(right, block_address<kHeadDim>(right_rows, n, step));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            mma_m16n8k16_bf16(sums[m][2 * n], left[m], right[0], right[1], sums[m][2 * n]);
            mma_m16n8k16_bf16(sums[m][2 * n + 1], left[m], right[2], right[3],
                              sums[m][2 * n + 1]);
        }
    }
}

template <int kM, int kN>
__device__ __forceinline__ void set_zero(float (&sums)[kM][kN][4]) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                sums[m][n][e] = 0.0f;
            }
        }
    }
}

// sums [16 kM, 16 kN] = left rows x right rows^T, both in shared memory, over the first kWidth
// elements of each row; `left_rows` is a `summed_address`.
template <int kHeadDim, int kM, int kN, int kWidth = kHeadDim>
__device__ __forceinline__ void multiply_rows(float (&sums)[kM][2 * kN][4], uint32 left_rows,
                                              uint32 right_rows) {
    set_zero(sums);
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
        uint32 left[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            ldmatrix_x4(left[m], block_address<kHeadDim>(left_rows, m, step));
        }
        multiply_step<kHeadDim, kM, kN>(sums, left, right_rows, step);
    }
}

// The same with the left rows in registers.
template <int kHeadDim, int kM, int kN>
__device__ __forceinline__ void multiply_rows(float (&sums)[kM][2 * kN][4],
                                              const uint32 (&left)[kM][kHeadDim / 16][4],
                                              uint32 right_rows) {
    set_zero(sums);
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
        uint32 left_step[kM][4];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                left_step[m][word] = left[m][step][word];
            }
        }
        multiply_step<kHeadDim, kM, kN>(sums, left_step, right_rows, step);
    }
}

// sums [16 kM, kWidth] += weights [16 kM, 16] x the rows of block `row_block`; `rows` is a
// `summed_address`.
template <int kHeadDim, int kM, int kWidth = kHeadDim>
__device__ __forceinline__ void add_weighted_rows(float (&sums)[kM][kWidth / 8][4],
                                                  const uint32 (&weights)[kM][4], uint32 rows,
                                                  int row_block) {
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
        uint32 right[4];
        ldmatrix_x4_trans(right, block_address<kHeadDim>(rows, row_block, step));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            mma_m16n8k16_bf16(sums[m][2 * step], weights[m], right[0], right[1],
                              sums[m][2 * step]);
            mma_m16n8k16_bf16(sums[m][2 * step + 1], weights[m], right[2], right[3],
                              sums[m][2 * step + 1]);
        }
    }
}

// Converts two neighbouring 16 x 8 results to a left operand of 16 x 16.
__device__ __forceinline__ void to_left(uint32 (&left)[4], const float (&first)[4],
                                        const float (&second)[4]) {
    left[0] = to_bf16_pair(first[0], first[1]);
    left[1] = to_bf16_pair(first[2], first[3]);
    left[2] = to_bf16_pair(second[0], second[1]);
    left[3] = to_bf16_pair(second[2], second[3]);
}

// Writes `sums` times `factors` (of rows l / 4 and l / 4 + 8 of each block) as BF16 rows of a head
// to global memory, through `tile`: rows of shared memory that no other warp accesses. Rows from
// `rows_left` on and elements from `width` on are skipped.
template <int kHeadDim, int kM, int kWidth = kHeadDim>
__device__ __forceinline__ void write_head_rows(const float (&sums)[kM][kWidth / 8][4],
                                                const float (&factors)[kM][2], uint8* tile,
                                                bf16* first_row, uint32 row_stride,
                                                int rows_left, uint32 width) {
    using Tile = HeadTile<kHeadDim>;
    constexpr int kUnits = kWidth / 8;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32 at = Tile::offset(16 * m + 8 * half + lane / 4, unit);
                *reinterpret_cast<uint32*>(tile + at + lane % 4 * 4) =
                    to_bf16_pair(sums[m][unit][2 * half] * factors[m][half],
                                 sums[m][unit][2 * half + 1] * factors[m][half]);
            }
        }
    }
    __syncwarp();
    static_assert(16 * kM * kUnits % 32 == 0, "each lane has as many units");
#pragma unroll
    for (int pass = 0; pass < 16 * kM * kUnits / 32; ++pass) {
        const int row = (pass * 32 + lane) / kUnits;
        const uint32 unit = (pass * 32 + lane) % kUnits;
        if (row < rows_left && unit * 8 < width) {
            *reinterpret_cast<uint4*>(first_row + static_cast<uint64>(row) * row_stride +
                                      unit * 8) =
                *reinterpret_cast<const uint4*>(tile + Tile::offset(row, unit));
        }
    }
}

// The same in FP32, from registers: a store instruction writes a 32-byte sector of each row.
template <int kHeadDim, int kM, int kWidth = kHeadDim>
__device__ __forceinline__ void write_head_rows(const float (&sums)[kM][kWidth / 8][4],
                                                const float (&factors)[kM][2], uint8*,
                                                float* first_row, uint32 row_stride,
                                                int rows_left, uint32 width) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half + lane / 4;
            float* const target =
                first_row + static_cast<uint64>(row) * row_stride + lane % 4 * 2;
#pragma unroll
            for (int unit = 0; unit < kWidth / 8; ++unit) {
                if (row < rows_left && unit * 8 < width) {
                    *reinterpret_cast<float2*>(target + unit * 8) =
                        make_float2(sums[m][unit][2 * half] * factors[m][half],
                                    sums[m][unit][2 * half + 1] * factors[m][half]);
                }
            }
        }
    }
}
