// Arithmetic on two 16-bit numbers in a word.
#pragma once

#include "common/types.cuh"

// Of each half, as BF16, the larger magnitude, NaN above all; its sign means nothing.
__device__ __forceinline__ uint32 max_magnitude_bf16x2(uint32 a, uint32 b) {
    uint32 larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// Of each half, as BF16, the smaller magnitude, of a number and NaN the number; its sign means
// nothing.
__device__ __forceinline__ uint32 min_magnitude_bf16x2(uint32 a, uint32 b) {
    uint32 smaller;
    asm("min.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(smaller) : "r"(a), "r"(b));
    return smaller;
}

// Products of the halves, as BF16, each rounded once.
__device__ __forceinline__ uint32 multiply_bf16x2(uint32 a, uint32 b) {
    uint32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
