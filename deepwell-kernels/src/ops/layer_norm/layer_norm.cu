// Layer normalization of rows, optionally of the sum of two matrices:
//
//   sum = x + delta (rounded to BF16; without delta, sum is x)
//   mean = mean(sum);  rstd = 1 / sqrt(mean((sum - mean)^2) + eps)
//   y = (sum - mean) * rstd * weight + bias
//
// The work is divided as in `rms_norm.cu`: a row stays in registers between its two sums. The mean
// is computed from distances to the first element, and the variance from distances to the mean, so
// neither cancels. Rows that are not whole vectors, or are too long, are processed by element and
// read three times.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/norm_value.cuh"
#include "layout/row_group.cuh"

constexpr int kThreadsMax = 512;
constexpr int kScalarThreads = 256;
constexpr int kRowVectors = 4;

template <bool kAdd>
__device__ __forceinline__ void normalize(const bf16* __restrict__ x,
                                          const bf16* __restrict__ delta,
                                          const bf16* __restrict__ weight,
                                          const bf16* __restrict__ bias, bf16* __restrict__ sum,
                                          bf16* __restrict__ y, float* __restrict__ mean,
                                          float* __restrict__ rstd, uint32 rows, uint32 columns,
                                          uint32 threads_per_row, float eps) {
    constexpr uint32 kSlices = RowGroup<kRowVectors>::slices(kThreadsMax);
    __shared__ float sums[2 * kSlices];
    const RowGroup<kRowVectors> group(threads_per_row, sums);
    const uint32 row = blockIdx.x * (blockDim.x / threads_per_row) + group.index;
    const uint32 vectors = columns / 8;
    const uint64 first = static_cast<uint64>(row) * vectors;

    // Loads the row, and the row's first element in every thread.
    uint4 packed[kRowVectors], other[kRowVectors];
    float origin = 0.0f;
    if (row < rows) {
        origin = to_f32(x[first * 8]);
        if (kAdd) {
            origin = to_f32(to_bf16(origin + to_f32(delta[first * 8])));
        }
    }
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        const uint32 vector = group.vector(p);
        packed[p] = other[p] = make_uint4(0, 0, 0, 0);
        if (row < rows && vector < vectors) {
            packed[p] = reinterpret_cast<const uint4*>(x)[first + vector];
            if (kAdd) {
                other[p] = reinterpret_cast<const uint4*>(delta)[first + vector];
            }
        }
    }
    float of_vectors[kRowVectors];
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        if (kAdd) {
            packed[p] = add_bf16x8(packed[p], other[p]);
            if (row < rows && group.vector(p) < vectors) {
                reinterpret_cast<uint4*>(sum)[first + group.vector(p)] = packed[p];
            }
        }
        const float distances = sum_of_distances(packed[p], origin);
        of_vectors[p] = group.vector(p) < vectors ? distances : 0.0f;
    }
    const float center = mean_from(origin, group.sum(of_vectors, vectors, 0), columns);
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        const float squares = sum_of_squared_distances(packed[p], center);
        of_vectors[p] = group.vector(p) < vectors ? squares : 0.0f;
    }
    const float scale = rms_rstd(group.sum(of_vectors, vectors, kSlices), columns, eps);
    if (row >= rows) {
        return;
    }
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        const uint32 vector = group.vector(p);
        if (vector < vectors) {
            reinterpret_cast<uint4*>(y)[first + vector] =
                layer_normalized(packed[p], center, scale,
                                 reinterpret_cast<const uint4*>(weight)[vector],
                                 reinterpret_cast<const uint4*>(bias)[vector]);
        }
    }
    if (group.lane == 0) {
        mean[row] = center;
        rstd[row] = scale;
    }
}

// x, delta, sum, y [rows, columns]; weight, bias [columns]; mean, rstd [rows]. Columns a multiple
// of 8, at most 32 * threads_per_row; threads_per_row a multiple of 32 that divides the CTA.
extern "C" __global__ void __launch_bounds__(kThreadsMax, 1)
    layer_norm_rows(const bf16* __restrict__ x, const bf16* __restrict__ weight,
                    const bf16* __restrict__ bias, bf16* __restrict__ y,
                    float* __restrict__ mean, float* __restrict__ rstd, uint32 rows,
                    uint32 columns, uint32 threads_per_row, float eps) {
    normalize<false>(x, nullptr, weight, bias, nullptr, y, mean, rstd, rows, columns,
                     threads_per_row, eps);
}

extern "C" __global__ void __launch_bounds__(kThreadsMax, 1)
    add_layer_norm_rows(const bf16* __restrict__ x, const bf16* __restrict__ delta,
                        const bf16* __restrict__ weight, const bf16* __restrict__ bias,
                        bf16* __restrict__ sum, bf16* __restrict__ y, float* __restrict__ mean,
                        float* __restrict__ rstd, uint32 rows, uint32 columns,
                        uint32 threads_per_row, float eps) {
    normalize<true>(x, delta, weight, bias, sum, y, mean, rstd, rows, columns, threads_per_row,
                    eps);
}

// One CTA per row, for any number of columns. Without delta, `sum` is unused.
template <bool kAdd>
__device__ __forceinline__ void normalize_scalar(const bf16* x, const bf16* delta,
                                                 const bf16* weight, const bf16* bias, bf16* sum,
                                                 bf16* y, float* mean, float* rstd,
                                                 uint32 columns, float eps) {
    const uint64 first = static_cast<uint64>(blockIdx.x) * columns;
    float origin = to_f32(x[first]);
    if (kAdd) {
        origin = to_f32(to_bf16(origin + to_f32(delta[first])));
    }
    float distances = 0.0f;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        float value = to_f32(x[first + i]);
        if (kAdd) {
            const bf16 rounded = to_bf16(value + to_f32(delta[first + i]));
            sum[first + i] = rounded;
            value = to_f32(rounded);
        }
        distances += value - origin;
    }
    const float center =
        mean_from(origin, sum_of_cta<kScalarThreads>(distances), columns);
    // Each thread reads the elements that it wrote itself.
    const bf16* const source = kAdd ? sum : x;
    float squares = 0.0f;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        const float distance = to_f32(source[first + i]) - center;
        squares += distance * distance;
    }
    const float scale = rms_rstd(sum_of_cta<kScalarThreads>(squares), columns, eps);
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        const float normalized = (to_f32(source[first + i]) - center) * scale;
        y[first + i] = to_bf16(normalized * to_f32(weight[i]) + to_f32(bias[i]));
    }
    if (threadIdx.x == 0) {
        mean[blockIdx.x] = center;
        rstd[blockIdx.x] = scale;
    }
}

extern "C" __global__ void __launch_bounds__(kScalarThreads)
    layer_norm_scalar(const bf16* x, const bf16* weight, const bf16* bias, bf16* y, float* mean,
                      float* rstd, uint32 rows, uint32 columns, uint32 threads_per_row,
                      float eps) {
    if (blockIdx.x < rows) {
        normalize_scalar<false>(x, nullptr, weight, bias, nullptr, y, mean, rstd, columns, eps);
    }
}

extern "C" __global__ void __launch_bounds__(kScalarThreads)
    add_layer_norm_scalar(const bf16* x, const bf16* delta, const bf16* weight, const bf16* bias,
                          bf16* sum, bf16* y, float* mean, float* rstd, uint32 rows,
                          uint32 columns, uint32 threads_per_row, float eps) {
    if (blockIdx.x < rows) {
        normalize_scalar<true>(x, delta, weight, bias, sum, y, mean, rstd, columns, eps);
    }
}
