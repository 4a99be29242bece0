// red: atomic additions in global memory without a return value.
#pragma once

#include "common/types.cuh"

// Adds four FP32, 16-byte aligned, each atomically. Callers must fix the order of additions from
// several threads if results are to be deterministic.
__device__ __forceinline__ void add_f32x4(float* sums, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(sums), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}
