// red: additions in global memory that return nothing.
#pragma once

#include "common/types.cuh"

// Adds four FP32, 16-byte aligned. Each is added at once; in which order those of several threads
// are added is for the callers to see to.
__device__ __forceinline__ void add_f32x4(float* sums, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(sums), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
