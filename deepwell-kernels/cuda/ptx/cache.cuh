// Loads with an L2 eviction policy. They are ordinary global loads otherwise and may read memory
// that other CTAs have written.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint4 load_by_policy(const void* from, uint64 policy) {
    uint4 value;
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from), "l"(policy)
                 : "memory");
    return value;
}

__device__ __forceinline__ uint64 policy_to_keep() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Loads data that another CTA will soon read again.
__device__ __forceinline__ uint4 load_to_keep(const void* from) {
    return load_by_policy(from, policy_to_keep());
}

// Loads data that no CTA will soon read again.
__device__ __forceinline__ uint4 load_for_the_last_time(const void* from) {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return load_by_policy(from, policy);
}
