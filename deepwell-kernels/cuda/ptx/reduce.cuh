// red: adding to device memory, where the sum is not wanted.
#pragma once

#include "common/types.cuh"

// Adds to four neighbors, 16-byte aligned. Each is one addition, rounded as any other but for
// subnormals, which count as zero and become zero.
__device__ __forceinline__ void add_to_f32x4(float* target, float4 values) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(target), "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w)
                 : "memory");
}
