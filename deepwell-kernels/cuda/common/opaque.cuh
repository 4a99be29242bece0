// Hides a value from the optimizer, for kernels that are short of registers.
#pragma once

#include "common/types.cuh"

// Returns `value`. The compiler recomputes expressions of the result in every iteration of a loop,
// instead of hoisting them out of the loop into registers.
__device__ __forceinline__ uint32 opaque(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
