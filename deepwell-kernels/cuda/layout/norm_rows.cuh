// Statistics of a row, computed by a warp, for a fused normalization: bit-identical to the unfused
// kernels (`rms_norm.cu`, `layer_norm.cu`), in the order of `common/row_sum.cuh`.
#pragma once

#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/norm_value.cuh"
#include "ptx/cache.cuh"

// Inputs of the normalization and all outputs except the quantized operands. Matrices are [rows,
// columns], of whole vectors of 16 bytes.
struct NormOperands {
    const bf16* x;
    const bf16* delta;   // with a preceding sum
    const bf16* weight;  // [columns]
    const bf16* bias;    // [columns], of a layer normalization
    bf16* sum;           // with a preceding sum
    bf16* y;             // null if no op reads it
    float* mean;         // [rows], of a layer normalization
    float* rstd;         // [rows]
    float eps;
};

// Vectors of a row that a thread loads together.
constexpr int kNormBatch = 8;

// Butterfly step between two threads whose lanes differ by `lanes`: a thread keeps one of two
// values and sends the other. Returns the sum of the kept and the received value.
__device__ __forceinline__ float keep_sum(float first, float second, uint32 lanes) {
    const bool keeps_second = threadIdx.x & lanes;
    const float kept = keeps_second ? second : first;
    const float given = keeps_second ? first : second;
    return __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, lanes));
}

// Sum over a row of one number per vector, returned in each thread of a warp. `values_of(first,
// values)` sets the numbers of vectors `first`, `first + 32`, ..., zero beyond the row.
//
// Sixteen threads hold the sixteen vectors of a slice. They reduce eight slices together, so that
// in the end each two threads hold the sum of one of the slices; from batch to batch they add the
// slices 32 further.
template <typename ValuesOf>
__device__ __forceinline__ float sum_of_row(uint32 vectors, const ValuesOf& values_of) {
    constexpr uint32 kBatchVectors = 32 * kNormBatch;
    constexpr uint32 kTurns = 32 / (2 * kNormBatch);  // batches of 32 slices
    const uint32 lane = threadIdx.x % 32;
    float sum = 0.0f;
#pragma unroll 1
    for (uint32 batch = 0; batch * kBatchVectors < vectors; ++batch) {
        float values[kNormBatch];
        values_of(batch * kBatchVectors + lane, values);
        uint32 lanes = 1;
#pragma unroll
        for (int count = kNormBatch / 2; count >= 1; count /= 2, lanes *= 2) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                values[i] = keep_sum(values[i], values[i + count], lanes);
            }
        }
        float of_slice = values[0];
#pragma unroll
        for (; lanes < kSliceVectors; lanes *= 2) {
            of_slice = __fadd_rn(of_slice, __shfl_xor_sync(0xffffffffu, of_slice, lanes));
        }
        if (lane % kSliceVectors / kNormBatch == batch % kTurns) {
            sum = __fadd_rn(sum, of_slice);
        }
    }
    // The tree over slices: neighbours are 16 threads apart, then half a batch, a quarter ...
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 16));
#pragma unroll
    for (uint32 lanes = kNormBatch / 2; lanes >= 1; lanes /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    }
#pragma unroll
    for (uint32 lanes = kNormBatch; lanes < kSliceVectors; lanes *= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lanes));
    }
    return sum;
}

// By a warp: computes the row's mean and rstd, and its sum with delta.
template <bool kLayer, bool kAdd>
__device__ __forceinline__ void norm_row(const NormOperands& operands, uint32 row,
                                         uint32 columns) {
    const uint32 vectors = columns / 8;
    const uint64 first = static_cast<uint64>(row) * vectors;
    const uint4* const x = reinterpret_cast<const uint4*>(operands.x) + first;
    const uint4* const delta = reinterpret_cast<const uint4*>(operands.delta) + first;
    uint4* const sum = reinterpret_cast<uint4*>(operands.sum) + first;
    float origin = 0.0f;
    if (kLayer) {
        origin = to_f32(operands.x[8 * first]);
        if (kAdd) {
            origin = to_f32(to_bf16(origin + to_f32(operands.delta[8 * first])));
        }
    }
    float total = sum_of_row(vectors, [&](uint32 begin, float(&values)[kNormBatch]) {
        uint4 of_x[kNormBatch], of_delta[kNormBatch];
#pragma unroll
        for (int i = 0; i < kNormBatch; ++i) {
            const uint32 vector = begin + 32 * i;
            of_x[i] = of_delta[i] = make_uint4(0, 0, 0, 0);
            if (vector < vectors) {
                of_x[i] = kAdd ? load_for_the_last_time(x + vector) : load_to_keep(x + vector);
                if (kAdd) {
                    of_delta[i] = load_for_the_last_time(delta + vector);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kNormBatch; ++i) {
            const uint32 vector = begin + 32 * i;
            if (kAdd) {
                of_x[i] = add_bf16x8(of_x[i], of_delta[i]);
                if (vector < vectors) {
                    sum[vector] = of_x[i];
                }
            }
            if (kLayer) {
                values[i] = vector < vectors ? sum_of_distances(of_x[i], origin) : 0.0f;
            } else {
                float of_vector[8];
                unpack_bf16x8(of_x[i], of_vector);
                values[i] = sum_of_squares(of_vector);
            }
        }
    });
    const bool tells = threadIdx.x % 32 == 0;
    if (kLayer) {
        const float mean = mean_from(origin, total, columns);
        // A thread rereads its own writes, so no barrier is needed.
        const uint4* const source = kAdd ? sum : x;
        total = sum_of_row(vectors, [&](uint32 begin, float(&values)[kNormBatch]) {
#pragma unroll
            for (int i = 0; i < kNormBatch; ++i) {
                const uint32 vector = begin + 32 * i;
                values[i] =
                    vector < vectors ? sum_of_squared_distances(source[vector], mean) : 0.0f;
            }
        });
        if (tells) {
            operands.mean[row] = mean;
        }
    }
    if (tells) {
        operands.rstd[row] = rms_rstd(total, columns, operands.eps);
    }
}
