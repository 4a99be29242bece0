// Election of one thread of a warp.
#pragma once

#include "common/types.cuh"

// Returns true in one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    uint32 elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected)
        :
        : "memory");
    return elected != 0;
}
