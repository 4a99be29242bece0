// Where registers are short: a value of which the compiler is not told what it is.
#pragma once

#include "common/types.cuh"

// `value`. What a loop computes from the result it computes in every turn, instead of once before
// the loop into registers that are then held through all of it.
__device__ __forceinline__ uint32 opaque(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
