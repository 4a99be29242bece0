// ex2 and lg2: powers and logarithms of two by the special function unit.
#pragma once

#include "common/types.cuh"

// 2^x within two units in the last place; denormal results are zero.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x) within 2^-22 of the value, or absolutely near 1.
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
