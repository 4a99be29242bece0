// Gradient of a bias: db[n] (+)= sum over rows of dy[t, n].
//
// dy [rows, columns] BF16 (FP32 after a router), db [columns] FP32. The rows are split into
// `splits` runs. A CTA sums 256 columns of one run; a warp takes every eighth row of the run, a
// lane eight columns (16 bytes). The last CTA of a column tile adds the runs' sums in a fixed
// order.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/last_cta.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kColumns = 256;
constexpr int kLaneColumns = kColumns / 32;
constexpr int kInFlight = 4;

static_assert(kColumns == kThreads, "a thread joins the warps' sums of one column");

template <bool kVector, typename Element>
__device__ __forceinline__ void load_row(const Element* __restrict__ row, uint32 column,
                                         uint32 columns, float (&values)[kLaneColumns]) {
    if constexpr (kVector) {
        if (column < columns) {
            unpack_bf16x8(*reinterpret_cast<const uint4*>(row + column), values);
        }
    } else {
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
            values[j] = column + j < columns ? to_f32(row[column + j]) : 0.0f;
        }
    }
}

// Adds the sums of the eight warps in order: thread t gets column t.
__device__ __forceinline__ float join_warps(float (&shared)[kWarps][kColumns],
                                            const float (&sums)[kLaneColumns]) {
    const uint32 warp = threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kLaneColumns; j += 4) {
        *reinterpret_cast<float4*>(&shared[warp][lane * kLaneColumns + j]) =
            make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        sum += shared[w][threadIdx.x];
    }
    return sum;
}

template <bool kVector, typename Element>
__device__ __forceinline__ void bias_grad(const Element* __restrict__ dy, float* db,
                                          float* partials, uint32* arrivals, uint64 rows,
                                          uint32 columns, uint32 splits, uint32 accumulate) {
    __shared__ alignas(16) float shared[kWarps][kColumns];
    const uint32 tiles = gridDim.x / splits;
    const uint32 tile = blockIdx.x % tiles;
    const uint64 split = blockIdx.x / tiles;
    const uint64 end = rows * (split + 1) / splits;
    const uint32 warp = threadIdx.x / 32;
    const uint32 first_column = tile * kColumns + threadIdx.x % 32 * kLaneColumns;

    float sums[kLaneColumns] = {};
    for (uint64 row = rows * split / splits + warp; row < end; row += kInFlight * kWarps) {
        float values[kInFlight][kLaneColumns] = {};
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (row + k * kWarps < end) {
                load_row<kVector>(dy + (row + k * kWarps) * columns, first_column, columns,
                                  values[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
            for (int j = 0; j < kLaneColumns; ++j) {
                sums[j] += values[k][j];
            }
        }
    }
    float sum = join_warps(shared, sums);
    const uint32 column = tile * kColumns + threadIdx.x;

    if (splits > 1) {
        // partials [splits, tiles * 256]
        const uint64 row_length = static_cast<uint64>(tiles) * kColumns;
        partials[split * row_length + column] = sum;
        if (!is_last_cta(arrivals + tile, splits)) {
            return;
        }
        float totals[kLaneColumns] = {};
        for (uint32 s = warp; s < splits; s += kWarps) {
            const float4* part =
                reinterpret_cast<const float4*>(partials + s * row_length + first_column);
            const float4 low = __ldcg(part);
            const float4 high = __ldcg(part + 1);
            const float values[kLaneColumns] = {low.x,  low.y,  low.z,  low.w,
                                                high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < kLaneColumns; ++j) {
                totals[j] += values[j];
            }
        }
        sum = join_warps(shared, totals);
    }
    if (column < columns) {
        db[column] = accumulate ? db[column] + sum : sum;
    }
}

// columns is a multiple of 8; grid: splits * ceil(columns / 256); partials is [splits, ceil(columns
// / 256) * 256], arrivals [ceil(columns / 256)].
extern "C" __global__ void __launch_bounds__(kThreads)
    bias_grad_vector(const bf16* __restrict__ dy, float* db, float* partials, uint32* arrivals,
                     uint64 rows, uint32 columns, uint32 splits, uint32 accumulate) {
    bias_grad<true>(dy, db, partials, arrivals, rows, columns, splits, accumulate);
}

// For any number of columns.
extern "C" __global__ void __launch_bounds__(kThreads)
    bias_grad_scalar(const bf16* __restrict__ dy, float* db, float* partials, uint32* arrivals,
                     uint64 rows, uint32 columns, uint32 splits, uint32 accumulate) {
    bias_grad<false>(dy, db, partials, arrivals, rows, columns, splits, accumulate);
}

// The same kernel in FP32.
extern "C" __global__ void __launch_bounds__(kThreads)
    bias_grad_f32(const float* __restrict__ dy, float* db, float* partials, uint32* arrivals,
                  uint64 rows, uint32 columns, uint32 splits, uint32 accumulate) {
    bias_grad<false>(dy, db, partials, arrivals, rows, columns, splits, accumulate);
}
