// Gradients of the layer normalization y = n * weight + bias, n = (x - mean) * rstd, of rows:
//
//   dx = dresidual + rstd * (g - mean(g) - n * mean(g * n)), g = dy * weight
//   dweight (+)= sum over rows of dy * n;  dbias (+)= sum over rows of dy
//
// The work is divided as in `rms_norm_backward.cu`, but a thread holds two vectors of a row instead
// of four, because it keeps two sums per column in registers.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/sum_over_ctas.cuh"
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/row_group.cuh"

constexpr int kThreads = 512;
constexpr int kScalarThreads = 256;
constexpr int kRowVectors = 2;

// Writes one column of the gradients of the weight, then of the bias.
__device__ __forceinline__ void write_gradient(float* dweight, float* dbias, uint32 columns,
                                               uint32 column, float total, bool accumulate) {
    float* const place = column < columns ? dweight + column : dbias + (column - columns);
    *place = accumulate ? *place + total : total;
}

// Adds a thread's eight sums to shared memory, or stores them there.
__device__ __forceinline__ void add_eight(float4* place, const float (&values)[8], bool add) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* const of = &values[4 * half];
        float4 total = make_float4(of[0], of[1], of[2], of[3]);
        if (add) {
            const float4 before = place[half];
            total = make_float4(before.x + total.x, before.y + total.y, before.z + total.z,
                                before.w + total.w);
        }
        place[half] = total;
    }
}

// dy, x, dresidual (or null), dx [rows, columns]; weight, dweight, dbias [columns]; mean, rstd
// [rows]; partials [gridDim.x + teams, 2 * columns], arrivals [1 + teams], teams of `members` CTAs.
// Columns a multiple of 8, at most 16 * threads_per_row; threads_per_row a multiple of 32 that
// divides kThreads. Dynamic shared memory: two FP32 per column.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    layer_norm_backward_rows(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                             const bf16* __restrict__ weight, const float* __restrict__ means,
                             const float* __restrict__ rstd, const bf16* __restrict__ dresidual,
                             bf16* __restrict__ dx, float* dweight, float* dbias, uint32 rows,
                             uint32 columns, uint32 threads_per_row, uint32 accumulate,
                             float* partials, uint32* arrivals, uint32 members) {
    constexpr uint32 kSlices = RowGroup<kRowVectors>::slices(kThreads);
    __shared__ float sums[4 * kSlices];
    extern __shared__ float4 dynamic[];
    const RowGroup<kRowVectors> group(threads_per_row, sums);
    const uint32 groups = kThreads / threads_per_row;
    const uint32 row_vectors = columns / 8;
    const uint4* const weights = reinterpret_cast<const uint4*>(weight);

    float of_weight[kRowVectors][8], of_bias[kRowVectors][8];
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            of_weight[p][i] = of_bias[p][i] = 0.0f;
        }
    }
    uint32 offset = 0;
    const uint64 stride = static_cast<uint64>(gridDim.x) * groups;
    // All groups run the same number of iterations, so that all warps reach the same barriers; a
    // group beyond the last row has no vectors.
    for (uint64 first_row = static_cast<uint64>(blockIdx.x) * groups; first_row < rows;
         first_row += stride) {
        const uint64 row = first_row + group.index;
        const uint32 vectors = row < rows ? row_vectors : 0;
        const uint64 first = row * row_vectors;
        uint4 packed_dy[kRowVectors], packed_x[kRowVectors], residual[kRowVectors];
#pragma unroll
        for (int p = 0; p < kRowVectors; ++p) {
            const uint32 vector = group.vector(p);
            packed_dy[p] = packed_x[p] = residual[p] = make_uint4(0, 0, 0, 0);
            if (vector < vectors) {
                packed_dy[p] = reinterpret_cast<const uint4*>(dy)[first + vector];
                packed_x[p] = reinterpret_cast<const uint4*>(x)[first + vector];
                if (dresidual != nullptr) {
                    residual[p] = reinterpret_cast<const uint4*>(dresidual)[first + vector];
                }
            }
        }
        const float scale = row < rows ? rstd[row] : 0.0f;
        const float center = row < rows ? means[row] : 0.0f;
        float of_g[kRowVectors], of_gn[kRowVectors];
#pragma unroll
        for (int p = 0; p < kRowVectors; ++p) {
            const uint32 vector = group.vector(p);
            of_g[p] = of_gn[p] = 0.0f;
            if (vector < vectors) {
                float g[8], n[8], w[8];
                unpack_bf16x8(packed_dy[p], g);
                unpack_bf16x8(packed_x[p], n);
                unpack_bf16x8(weights[vector], w);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    g[i] = __fmul_rn(g[i], w[i]);
                    of_g[p] = __fadd_rn(of_g[p], g[i]);
                    n[i] = (n[i] - center) * scale;
                }
                of_gn[p] = sum_of_products(g, n);
            }
        }
        const float mean_g = group.sum(of_g, vectors, offset) / columns;
        const float mean_gn = group.sum(of_gn, vectors, offset + kSlices) / columns;
        offset ^= 2 * kSlices;
#pragma unroll
        for (int p = 0; p < kRowVectors; ++p) {
            const uint32 vector = group.vector(p);
            if (vector < vectors) {
                float g[8], n[8], w[8], added[8];
                unpack_bf16x8(packed_dy[p], g);
                unpack_bf16x8(packed_x[p], n);
                unpack_bf16x8(weights[vector], w);
                unpack_bf16x8(residual[p], added);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    n[i] = (n[i] - center) * scale;
                    of_weight[p][i] = __fmaf_rn(g[i], n[i], of_weight[p][i]);
                    of_bias[p][i] += g[i];
                    const float of_x = __fmaf_rn(g[i], w[i], -mean_g);
                    added[i] = __fmaf_rn(scale, __fmaf_rn(-n[i], mean_gn, of_x), added[i]);
                }
                reinterpret_cast<uint4*>(dx)[first + vector] = pack_bf16x8(added);
            }
        }
    }

    // The groups of the CTA add their sums in order.
    for (uint32 turn = 0; turn < groups; ++turn) {
        if (group.index == turn) {
#pragma unroll
            for (int p = 0; p < kRowVectors; ++p) {
                const uint32 vector = group.vector(p);
                if (vector < row_vectors) {
                    add_eight(dynamic + 2 * vector, of_weight[p], turn > 0);
                    add_eight(dynamic + 2 * (row_vectors + vector), of_bias[p], turn > 0);
                }
            }
        }
        __syncthreads();
    }
    const uint32 width = 2 * columns;
    float4* const partial =
        reinterpret_cast<float4*>(partials + static_cast<uint64>(blockIdx.x) * width);
    for (uint32 i = threadIdx.x; i < width / 4; i += kThreads) {
        partial[i] = dynamic[i];
    }
    sum_over_ctas(partials, width, members, arrivals, [&](uint32 column, float total) {
        write_gradient(dweight, dbias, columns, column, total, accumulate);
    });
}

// The same for any number of columns. A CTA loops over rows, with its part of dweight and dbias in
// scratch from the start.
extern "C" __global__ void __launch_bounds__(kScalarThreads)
    layer_norm_backward_scalar(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                               const bf16* __restrict__ weight, const float* __restrict__ means,
                               const float* __restrict__ rstd, const bf16* __restrict__ dresidual,
                               bf16* __restrict__ dx, float* dweight, float* dbias, uint32 rows,
                               uint32 columns, uint32 threads_per_row, uint32 accumulate,
                               float* partials, uint32* arrivals, uint32 members) {
    const uint32 width = 2 * columns;
    float* const partial = partials + static_cast<uint64>(blockIdx.x) * width;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        partial[i] = partial[columns + i] = 0.0f;
    }
    for (uint64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint64 first = row * columns;
        const float scale = rstd[row], center = means[row];
        float of_g = 0.0f, of_gn = 0.0f;
        for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
            const float g = __fmul_rn(to_f32(dy[first + i]), to_f32(weight[i]));
            of_g = __fadd_rn(of_g, g);
            of_gn = __fmaf_rn(g, (to_f32(x[first + i]) - center) * scale, of_gn);
        }
        const float mean_g = sum_of_cta<kScalarThreads>(of_g) / columns;
        const float mean_gn = sum_of_cta<kScalarThreads>(of_gn) / columns;
        for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
            const float g = to_f32(dy[first + i]);
            const float n = (to_f32(x[first + i]) - center) * scale;
            const float added = dresidual != nullptr ? to_f32(dresidual[first + i]) : 0.0f;
            const float of_x = __fmaf_rn(g, to_f32(weight[i]), -mean_g);
            dx[first + i] = to_bf16(__fmaf_rn(scale, __fmaf_rn(-n, mean_gn, of_x), added));
            partial[i] = __fmaf_rn(g, n, partial[i]);
            partial[columns + i] += g;
        }
    }
    sum_over_ctas(partials, width, members, arrivals, [&](uint32 column, float total) {
        write_gradient(dweight, dbias, columns, column, total, accumulate);
    });
}
