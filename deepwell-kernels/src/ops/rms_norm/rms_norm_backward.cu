// Gradients of the root-mean-square normalization y = n * weight, n = x * rstd, of rows:
//
//   dx = dresidual + rstd * (g - n * mean(g * n)), g = dy * weight
//   dweight (+)= sum over rows of dy * n
//
// There is one CTA per SM. A row belongs to as many warps as can hold it in registers, and each
// such group loops over rows. A thread keeps the same columns throughout, so its part of dweight
// stays in registers until the end. Then the groups of a CTA add their parts in shared memory, and
// the CTAs in scratch. Each row is read once and written once. Rows that are not whole vectors, or
// are too long, are processed by element.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/sum_over_ctas.cuh"
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/row_group.cuh"

constexpr int kThreads = 512;
constexpr int kScalarThreads = 256;
constexpr int kRowVectors = 4;

__device__ __forceinline__ void write_gradient(float* dweight, uint32 column, float total,
                                               bool accumulate) {
    dweight[column] = accumulate ? dweight[column] + total : total;
}

// dy, x, dresidual (or null), dx [rows, columns]; weight, dweight [columns]; rstd [rows]; partials
// [gridDim.x + teams, columns], arrivals [1 + teams], teams of `members` CTAs. Columns a multiple
// of 8, at most 32 * threads_per_row; threads_per_row a multiple of 32 that divides kThreads.
// Dynamic shared memory: one FP32 per column.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    rms_norm_backward_rows(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                           const bf16* __restrict__ weight, const float* __restrict__ rstd,
                           const bf16* __restrict__ dresidual, bf16* __restrict__ dx,
                           float* dweight, uint32 rows, uint32 columns, uint32 threads_per_row,
                           uint32 accumulate, float* partials, uint32* arrivals, uint32 members) {
    constexpr uint32 kSlices = RowGroup<kRowVectors>::slices(kThreads);
    __shared__ float sums[2 * kSlices];
    extern __shared__ float4 dynamic[];
    const RowGroup<kRowVectors> group(threads_per_row, sums);
    const uint32 groups = kThreads / threads_per_row;
    const uint32 row_vectors = columns / 8;
    const uint4* const weights = reinterpret_cast<const uint4*>(weight);

    float of_columns[kRowVectors][8];
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            of_columns[p][i] = 0.0f;
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
        float products[kRowVectors];
#pragma unroll
        for (int p = 0; p < kRowVectors; ++p) {
            float g[8], n[8], w[8];
            const uint32 vector = group.vector(p);
            const uint4 zero = make_uint4(0, 0, 0, 0);
            unpack_bf16x8(packed_dy[p], g);
            unpack_bf16x8(packed_x[p], n);
            unpack_bf16x8(vector < vectors ? weights[vector] : zero, w);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                g[i] *= w[i];
            }
            products[p] = sum_of_products(g, n);
        }
        const float mean = group.sum(products, vectors, offset) * scale / columns;
        offset ^= kSlices;
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
                    n[i] = __fmul_rn(n[i], scale);
                    of_columns[p][i] = __fmaf_rn(g[i], n[i], of_columns[p][i]);
                    const float of_x = __fmaf_rn(g[i], w[i], -__fmul_rn(n[i], mean));
                    added[i] = __fmaf_rn(scale, of_x, added[i]);
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
                if (group.vector(p) < row_vectors) {
                    float4* const place = dynamic + 2 * group.vector(p);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* const of = &of_columns[p][4 * half];
                        float4 total = make_float4(of[0], of[1], of[2], of[3]);
                        if (turn > 0) {
                            const float4 before = place[half];
                            total = make_float4(before.x + total.x, before.y + total.y,
                                                before.z + total.z, before.w + total.w);
                        }
                        place[half] = total;
                    }
                }
            }
        }
        __syncthreads();
    }
    float4* const partial =
        reinterpret_cast<float4*>(partials + static_cast<uint64>(blockIdx.x) * columns);
    for (uint32 i = threadIdx.x; i < columns / 4; i += kThreads) {
        partial[i] = dynamic[i];
    }
    sum_over_ctas(partials, columns, members, arrivals, [&](uint32 column, float total) {
        write_gradient(dweight, column, total, accumulate);
    });
}

// The same for any number of columns. A CTA loops over rows, with its part of dweight in scratch
// from the start.
extern "C" __global__ void __launch_bounds__(kScalarThreads)
    rms_norm_backward_scalar(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                             const bf16* __restrict__ weight, const float* __restrict__ rstd,
                             const bf16* __restrict__ dresidual, bf16* __restrict__ dx,
                             float* dweight, uint32 rows, uint32 columns, uint32 threads_per_row,
                             uint32 accumulate, float* partials, uint32* arrivals,
                             uint32 members) {
    float* const partial = partials + static_cast<uint64>(blockIdx.x) * columns;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        partial[i] = 0.0f;
    }
    for (uint64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const uint64 first = row * columns;
        float products = 0.0f;
        for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
            const float g = __fmul_rn(to_f32(dy[first + i]), to_f32(weight[i]));
            products = __fmaf_rn(g, to_f32(x[first + i]), products);
        }
        const float scale = rstd[row];
        const float mean = sum_of_cta<kScalarThreads>(products) * scale / columns;
        for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
            const float g = to_f32(dy[first + i]), n = __fmul_rn(to_f32(x[first + i]), scale);
            const float added = dresidual != nullptr ? to_f32(dresidual[first + i]) : 0.0f;
            const float of_x = __fmaf_rn(g, to_f32(weight[i]), -__fmul_rn(n, mean));
            dx[first + i] = to_bf16(__fmaf_rn(scale, of_x, added));
            partial[i] = __fmaf_rn(g, n, partial[i]);
        }
    }
    sum_over_ctas(partials, columns, members, arrivals, [&](uint32 column, float total) {
        write_gradient(dweight, column, total, accumulate);
    });
}
