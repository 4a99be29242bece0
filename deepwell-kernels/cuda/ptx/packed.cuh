// Arithmetic on two 16-bit integers in a word.
#pragma once

#include "common/types.cuh"

// The larger of each half, as unsigned numbers.
__device__ __forceinline__ uint32 max_u16x2(uint32 a, uint32 b) {
    uint32 larger;
    asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
