// Stores by shared-memory address; the counterpart of ptx/shared_load.cuh.
#pragma once

#include "common/types.cuh"

// `address` is a multiple of 8.
__device__ __forceinline__ void shared_store_f32x2(uint32 address, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                 :
                 : "r"(address), "f"(first), "f"(second)
                 : "memory");
}
