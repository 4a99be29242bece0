// The largest finite magnitude of a matrix, or of the matrix after a Hadamard transform of groups
// of 16 elements, for the tensor scale of NVFP4. Magnitudes have the order of their bits, so the
// maximum over CTAs is one of integers, in any order.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_block.cuh"

constexpr int kThreads = 256;

__device__ __forceinline__ uint32 finite_magnitude(float x) {
    const uint32 magnitude = __float_as_uint(x) & 0x7fffffffu;
    return magnitude < kInfinityBits ? magnitude : 0;
}

// The largest of a word: one FP32, or two BF16.
template <typename E>
__device__ __forceinline__ uint32 largest_of_word(uint32 word) {
    if constexpr (sizeof(E) == 4) {
        return finite_magnitude(__uint_as_float(word));
    } else {
        return max(finite_magnitude(low_to_f32(word)), finite_magnitude(high_to_f32(word)));
    }
}

// Every CTA raises `amax`, which is zero before the launch.
__device__ __forceinline__ void raise(uint32 largest, uint32* amax) {
    __shared__ uint32 of_warps[kThreads / 32];
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = largest;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 1; warp < kThreads / 32; ++warp) {
            largest = max(largest, of_warps[warp]);
        }
        atomicMax(amax, largest);
    }
}

template <typename E>
__device__ __forceinline__ void amax_of_all(const E* __restrict__ x, uint64 elements,
                                            uint32* amax) {
    constexpr uint32 kVector = 16 / sizeof(E);
    const uint64 thread = blockIdx.x * static_cast<uint64>(kThreads) + threadIdx.x;
    const uint64 threads = gridDim.x * static_cast<uint64>(kThreads);
    const uint64 vectors = elements / kVector;
    uint32 largest = 0;
#pragma unroll 4
    for (uint64 at = thread; at < vectors; at += threads) {
        const uint4 vector = reinterpret_cast<const uint4*>(x)[at];
        largest = max(max(largest, largest_of_word<E>(vector.x)), largest_of_word<E>(vector.y));
        largest = max(max(largest, largest_of_word<E>(vector.z)), largest_of_word<E>(vector.w));
    }
    for (uint64 at = vectors * kVector + thread; at < elements; at += threads) {
        largest = max(largest, finite_magnitude(to_f32(x[at])));
    }
    raise(largest, amax);
}

__device__ __forceinline__ uint32 largest_of_group(float (&group)[kFp4Block], uint32 flags) {
    fp4_hadamard(group, flags);
    uint32 largest = 0;
#pragma unroll
    for (uint32 i = 0; i < kFp4Block; ++i) {
        largest = max(largest, finite_magnitude(group[i]));
    }
    return largest;
}

// Groups of 16 rows of a matrix [groups * 16, columns].
template <typename E>
__device__ __forceinline__ void amax_of_groups(const E* __restrict__ x, uint32 groups,
                                               uint32 columns, uint32 flags, uint32* amax) {
    const uint64 thread = blockIdx.x * static_cast<uint64>(kThreads) + threadIdx.x;
    const uint64 threads = gridDim.x * static_cast<uint64>(kThreads);
    uint32 largest = 0;
    if (sizeof(E) == 2 && columns % 2 == 0) {
        // A thread has two columns, whose elements are in one word.
        const uint32 pairs = columns / 2;
        for (uint64 at = thread; at < static_cast<uint64>(groups) * pairs; at += threads) {
            const uint64 first = at / pairs * kFp4Block * pairs + at % pairs;
            const uint32* const words = reinterpret_cast<const uint32*>(x) + first;
            float low[kFp4Block], high[kFp4Block];
#pragma unroll
            for (uint32 i = 0; i < kFp4Block; ++i) {
                const uint32 word = words[i * static_cast<uint64>(pairs)];
                low[i] = low_to_f32(word), high[i] = high_to_f32(word);
            }
            largest = max(largest, largest_of_group(low, flags));
            largest = max(largest, largest_of_group(high, flags));
        }
    } else {
        for (uint64 at = thread; at < static_cast<uint64>(groups) * columns; at += threads) {
            const E* const first = x + at / columns * kFp4Block * columns + at % columns;
            float group[kFp4Block];
#pragma unroll
            for (uint32 i = 0; i < kFp4Block; ++i) {
                group[i] = to_f32(first[i * static_cast<uint64>(columns)]);
            }
            largest = max(largest, largest_of_group(group, flags));
        }
    }
    raise(largest, amax);
}

// Groups of 16 rows of a matrix [groups * 16, columns]: the largest magnitude of the elements, and
// the largest after the transform, from one read.
__device__ __forceinline__ void amaxes_of_groups(const bf16* __restrict__ x, uint32 groups,
                                                 uint32 columns, uint32 flags, uint32* amax,
                                                 uint32* transformed_amax) {
    const uint64 thread = blockIdx.x * static_cast<uint64>(kThreads) + threadIdx.x;
    const uint64 threads = gridDim.x * static_cast<uint64>(kThreads);
    const uint32 pairs = columns / 2;
    uint32 largest = 0, of_transformed = 0;
    for (uint64 at = thread; at < static_cast<uint64>(groups) * pairs; at += threads) {
        const uint64 first = at / pairs * kFp4Block * pairs + at % pairs;
        const uint32* const words = reinterpret_cast<const uint32*>(x) + first;
        float low[kFp4Block], high[kFp4Block];
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            const uint32 word = words[i * static_cast<uint64>(pairs)];
            low[i] = low_to_f32(word), high[i] = high_to_f32(word);
            largest = max(largest, largest_of_word<bf16>(word));
        }
        of_transformed = max(of_transformed, largest_of_group(low, flags));
        of_transformed = max(of_transformed, largest_of_group(high, flags));
    }
    raise(largest, amax);
    __syncthreads();
    raise(of_transformed, transformed_amax);
}

// x [groups * 16, columns], 16-byte aligned, an even number of columns; both results [1], zero
// before the launch.
extern "C" __global__ void __launch_bounds__(kThreads)
    amaxes_bf16(const bf16* __restrict__ x, uint32 groups, uint32 columns, uint32 flags,
                uint32* amax, uint32* transformed_amax) {
    amaxes_of_groups(x, groups, columns, flags, amax, transformed_amax);
}

// x, 16-byte aligned; amax [1], zero before the launch.
#define AMAX_KERNELS(element, E)                                                                 \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        amax_##element(const E* __restrict__ x, uint64 elements, uint32* amax) {                 \
        amax_of_all(x, elements, amax);                                                          \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        amax_transformed_##element(const E* __restrict__ x, uint32 groups, uint32 columns,       \
                                   uint32 flags, uint32* amax) {                                 \
        amax_of_groups(x, groups, columns, flags, amax);                                         \
    }

AMAX_KERNELS(bf16, bf16)
AMAX_KERNELS(f32, float)
