// Global L2 norm of all gradients: norm = sqrt(sum over tensors and elements of g^2), either in one
// launch or, with gradients sharded over ranks, from the ranks' gathered sums.
//
// The tensors are one list of chunks of 8192 elements; CTA b sums the chunks b, b + grid, ..., with
// each thread at the same elements of each chunk. Squares are exact in FP64 and cannot overflow, so
// the norm is finite exactly when every gradient is finite (and the norm fits FP32). An SM of an
// H200 widens 16 numbers per cycle; memory delivers four or five. The last CTA adds the CTAs' sums.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/sum_f64.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kVectorsPerThread = 8;
constexpr uint64 kChunk = kThreads * kVectorsPerThread * 4;

// A non-empty tensor of the list.
struct Gradient {
    const float* values;  // 16-byte aligned
    uint64 elements;
    uint64 first_chunk;
};

struct Sums {
    double x = 0.0, y = 0.0, z = 0.0, w = 0.0;
};

__device__ __forceinline__ void add_square(double& sum, float value) {
    const double wide = value;
    sum = fma(wide, wide, sum);
}

__device__ __forceinline__ void add_squares(Sums& sums, float4 values) {
    add_square(sums.x, values.x);
    add_square(sums.y, values.y);
    add_square(sums.z, values.z);
    add_square(sums.w, values.w);
}

__device__ __forceinline__ void add_whole_chunk(Sums& sums, const float* values) {
    float4 loaded[kVectorsPerThread];
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
        loaded[k] = reinterpret_cast<const float4*>(values)[threadIdx.x + k * kThreads];
    }
#pragma unroll
    for (int k = 0; k < kVectorsPerThread; ++k) {
        add_squares(sums, loaded[k]);
    }
}

__device__ __forceinline__ void add_last_chunk(Sums& sums, const float* values, uint32 elements) {
    for (uint32 i = threadIdx.x; i < elements / 4; i += kThreads) {
        add_squares(sums, reinterpret_cast<const float4*>(values)[i]);
    }
    const uint32 tail = elements / 4 * 4 + threadIdx.x;
    if (tail < elements) {
        add_square(sums.x, values[tail]);
    }
}

// Computes the sum of all squares in thread 0 of the last CTA to arrive; returns true in this
// thread. table [tensors], partials [gridDim.x].
__device__ __forceinline__ bool sum_of_all(const Gradient* __restrict__ table, uint32 tensors,
                                           uint64 chunks, double* partials, uint32* arrivals,
                                           double& total) {
    Sums sums;
    uint32 tensor = 0;
    for (uint64 chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        while (tensor + 1 < tensors && chunk >= table[tensor + 1].first_chunk) {
            ++tensor;
        }
        const Gradient gradient = table[tensor];
        const uint64 first = (chunk - gradient.first_chunk) * kChunk;
        const uint64 left = gradient.elements - first;
        if (left >= kChunk) {
            add_whole_chunk(sums, gradient.values + first);
        } else {
            add_last_chunk(sums, gradient.values + first, static_cast<uint32>(left));
        }
    }
    const double sum = sum_over_cta<kWarps>((sums.x + sums.y) + (sums.z + sums.w));
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
    }
    if (!is_last_cta(arrivals, gridDim.x)) {
        return false;
    }
    double joined = 0.0;
    for (uint32 cta = threadIdx.x; cta < gridDim.x; cta += kThreads) {
        joined += __ldcg(partials + cta);
    }
    total = sum_over_cta<kWarps>(joined);
    return threadIdx.x == 0;
}

// norm [1].
extern "C" __global__ void __launch_bounds__(kThreads)
    grad_norm(const Gradient* __restrict__ table, uint32 tensors, uint64 chunks, double* partials,
              uint32* arrivals, float* norm) {
    double total;
    if (sum_of_all(table, tensors, chunks, partials, arrivals, total)) {
        *norm = static_cast<float>(sqrt(total));
    }
}

// sum [1].
extern "C" __global__ void __launch_bounds__(kThreads)
    sum_of_squares(const Gradient* __restrict__ table, uint32 tensors, uint64 chunks,
                   double* partials, uint32* arrivals, double* sum) {
    double total;
    if (sum_of_all(table, tensors, chunks, partials, arrivals, total)) {
        *sum = total;
    }
}

// Sums [count] of one rank or several.
struct SumList {
    const double* sums;
    uint64 count;
};

// table [lists], norm [1]. One thread adds all sums in order, list by list.
extern "C" __global__ void norm_of_sums(const SumList* __restrict__ table, uint32 lists,
                                        float* norm) {
    if (threadIdx.x > 0) {
        return;
    }
    double total = 0.0;
    for (uint32 list = 0; list < lists; ++list) {
        const SumList of = table[list];
        for (uint64 i = 0; i < of.count; ++i) {
            total += of.sums[i];
        }
    }
    *norm = static_cast<float>(sqrt(total));
}
