// Arithmetic on pairs of FP32 in a register pair (sm_100 and later): one issue slot for two
// results. Denormal results are zero.
#pragma once

#include "common/types.cuh"

struct FloatPair {
    uint64 bits;
};

__device__ __forceinline__ FloatPair pair_of(float first, float second) {
    FloatPair pair;
    asm("mov.b64 %0, {%1, %2};" : "=l"(pair.bits) : "f"(first), "f"(second));
    return pair;
}

__device__ __forceinline__ void unpack(FloatPair pair, float& first, float& second) {
    asm("mov.b64 {%0, %1}, %2;" : "=f"(first), "=f"(second) : "l"(pair.bits));
}

__device__ __forceinline__ FloatPair add(FloatPair a, FloatPair b) {
    FloatPair sum;
    asm("add.rn.ftz.f32x2 %0, %1, %2;" : "=l"(sum.bits) : "l"(a.bits), "l"(b.bits));
    return sum;
}

// a + b, rounded down.
__device__ __forceinline__ FloatPair add_down(FloatPair a, FloatPair b) {
    FloatPair sum;
    asm("add.rm.ftz.f32x2 %0, %1, %2;" : "=l"(sum.bits) : "l"(a.bits), "l"(b.bits));
    return sum;
}

__device__ __forceinline__ FloatPair subtract(FloatPair a, FloatPair b) {
    FloatPair difference;
    asm("sub.rn.ftz.f32x2 %0, %1, %2;" : "=l"(difference.bits) : "l"(a.bits), "l"(b.bits));
    return difference;
}

__device__ __forceinline__ FloatPair multiply(FloatPair a, FloatPair b) {
    FloatPair product;
    asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(product.bits) : "l"(a.bits), "l"(b.bits));
    return product;
}

// a b + c, rounded once.
__device__ __forceinline__ FloatPair multiply_add(FloatPair a, FloatPair b, FloatPair c) {
    FloatPair sum;
    asm("fma.rn.ftz.f32x2 %0, %1, %2, %3;"
        : "=l"(sum.bits)
        : "l"(a.bits), "l"(b.bits), "l"(c.bits));
    return sum;
}
