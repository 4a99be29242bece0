// Maxima of FP32 that are NaN if any operand is NaN.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ float max_or_nan(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

// The same of three (sm_100 and later).
__device__ __forceinline__ float max_or_nan(float a, float b, float c) {
    float largest;
    asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(largest) : "f"(a), "f"(b), "f"(c));
    return largest;
}
