// Arithmetic on pairs of BF16 in a word.
#pragma once

#include "common/types.cuh"

// Larger magnitude of each half, as BF16; NaN if either is NaN. The sign has no meaning.
__device__ __forceinline__ uint32 max_magnitude_bf16x2(uint32 a, uint32 b) {
    uint32 larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Smaller magnitude of each half, as BF16; of a number and NaN, the number. The sign has no
// meaning.
__device__ __forceinline__ uint32 min_magnitude_bf16x2(uint32 a, uint32 b) {
    uint32 smaller;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
    return smaller;
}

// Product of each half, as BF16, rounded once.
__device__ __forceinline__ uint32 multiply_bf16x2(uint32 a, uint32 b) {
    uint32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
