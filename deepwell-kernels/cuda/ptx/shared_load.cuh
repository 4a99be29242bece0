// Loads by shared-memory address, a sum of values that are known early. With generic pointers the
// compiler repeatedly recomputes the conversion from the CTA's address in the cluster.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32 shared_load_byte(uint32 address) {
    uint32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}

// `address` is a multiple of 16.
__device__ __forceinline__ uint4 shared_load_uint4(uint32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}

__device__ __forceinline__ float shared_load_f32(uint32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

// `address` is a multiple of 16.
__device__ __forceinline__ float4 shared_load_float4(uint32 address) {
    float4 value;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
}
