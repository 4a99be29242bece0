// Root-mean-square normalization of rows, optionally of the sum of two matrices:
//
//   sum = x + delta (rounded to BF16; without delta, sum is x)
//   rstd = 1 / sqrt(mean(sum^2) + eps);  y = sum * rstd * weight
//
// A row belongs to as many warps as are needed to hold it in registers, with four vectors of 16
// bytes per thread, so it is read once; short rows share a CTA. The sum of squares follows the
// order of `common/row_sum.cuh`, as in the kernel with quantization. Rows that are not whole
// vectors, or are too long, are processed by element and read twice.
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
                                          bf16* __restrict__ sum, bf16* __restrict__ y,
                                          float* __restrict__ rstd, uint32 rows, uint32 columns,
                                          uint32 threads_per_row, float eps) {
    __shared__ float sums[RowGroup<kRowVectors>::slices(kThreadsMax)];
    const RowGroup<kRowVectors> group(threads_per_row, sums);
    const uint32 row = blockIdx.x * (blockDim.x / threads_per_row) + group.index;
    const uint32 vectors = columns / 8;
    const uint64 first = static_cast<uint64>(row) * vectors;

    // Loads the row and, early, the weights.
    uint4 packed[kRowVectors], other[kRowVectors], weights[kRowVectors];
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        const uint32 vector = group.vector(p);
        packed[p] = other[p] = weights[p] = make_uint4(0, 0, 0, 0);
        if (row < rows && vector < vectors) {
            packed[p] = reinterpret_cast<const uint4*>(x)[first + vector];
            if (kAdd) {
                other[p] = reinterpret_cast<const uint4*>(delta)[first + vector];
            }
            weights[p] = reinterpret_cast<const uint4*>(weight)[vector];
        }
    }
    float squares[kRowVectors];
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        if (kAdd) {
            packed[p] = add_bf16x8(packed[p], other[p]);
            if (row < rows && group.vector(p) < vectors) {
                reinterpret_cast<uint4*>(sum)[first + group.vector(p)] = packed[p];
            }
        }
        float values[8];
        unpack_bf16x8(packed[p], values);
        squares[p] = sum_of_squares(values);
    }
    const float scale = rms_rstd(group.sum(squares, vectors, 0), columns, eps);
    if (row >= rows) {
        return;
    }
#pragma unroll
    for (int p = 0; p < kRowVectors; ++p) {
        if (group.vector(p) < vectors) {
            reinterpret_cast<uint4*>(y)[first + group.vector(p)] =
                rms_normalized(packed[p], scale, weights[p]);
        }
    }
    if (group.lane == 0) {
        rstd[row] = scale;
    }
}

// x, delta, sum, y [rows, columns]; weight [columns]; rstd [rows]. Columns a multiple of 8, at
// most 32 * threads_per_row; threads_per_row a multiple of 32 that divides the CTA.
extern "C" __global__ void __launch_bounds__(kThreadsMax, 1)
    rms_norm_rows(const bf16* __restrict__ x, const bf16* __restrict__ weight,
                  bf16* __restrict__ y, float* __restrict__ rstd, uint32 rows, uint32 columns,
                  uint32 threads_per_row, float eps) {
    normalize<false>(x, nullptr, weight, nullptr, y, rstd, rows, columns, threads_per_row, eps);
}

extern "C" __global__ void __launch_bounds__(kThreadsMax, 1)
    add_rms_norm_rows(const bf16* __restrict__ x, const bf16* __restrict__ delta,
                      const bf16* __restrict__ weight, bf16* __restrict__ sum,
                      bf16* __restrict__ y, float* __restrict__ rstd, uint32 rows, uint32 columns,
                      uint32 threads_per_row, float eps) {
    normalize<true>(x, delta, weight, sum, y, rstd, rows, columns, threads_per_row, eps);
}

// One CTA per row, for any number of columns. Without delta, `sum` is unused.
template <bool kAdd>
__device__ __forceinline__ void normalize_scalar(const bf16* x, const bf16* delta,
                                                 const bf16* weight, bf16* sum, bf16* y,
                                                 float* rstd, uint32 columns, float eps) {
    const uint64 first = static_cast<uint64>(blockIdx.x) * columns;
    float squares = 0.0f;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        float value = to_f32(x[first + i]);
        if (kAdd) {
            const bf16 rounded = to_bf16(value + to_f32(delta[first + i]));
            sum[first + i] = rounded;
            value = to_f32(rounded);
        }
        squares += value * value;
    }
    const float scale = rms_rstd(sum_of_cta<kScalarThreads>(squares), columns, eps);
    // Each thread reads the elements that it wrote itself.
    const bf16* const source = kAdd ? sum : x;
    for (uint32 i = threadIdx.x; i < columns; i += kScalarThreads) {
        y[first + i] = to_bf16(to_f32(source[first + i]) * scale * to_f32(weight[i]));
    }
    if (threadIdx.x == 0) {
        rstd[blockIdx.x] = scale;
    }
}

extern "C" __global__ void __launch_bounds__(kScalarThreads)
    rms_norm_scalar(const bf16* x, const bf16* weight, bf16* y, float* rstd, uint32 rows,
                    uint32 columns, uint32 threads_per_row, float eps) {
    if (blockIdx.x < rows) {
        normalize_scalar<false>(x, nullptr, weight, nullptr, y, rstd, columns, eps);
    }
}

extern "C" __global__ void __launch_bounds__(kScalarThreads)
    add_rms_norm_scalar(const bf16* x, const bf16* delta, const bf16* weight, bf16* sum, bf16* y,
                        float* rstd, uint32 rows, uint32 columns, uint32 threads_per_row,
                        float eps) {
    if (blockIdx.x < rows) {
        normalize_scalar<true>(x, delta, weight, sum, y, rstd, columns, eps);
    }
}
