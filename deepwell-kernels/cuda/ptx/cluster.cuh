// Blocks of a cluster: their barrier, and each other's shared memory.
#pragma once

#include "common/types.cuh"

// Waits for all threads of the cluster; what they wrote before, to shared memory too, is then
// visible to each other. A launch without clusters has clusters of one block.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// The place that `local`, an address in this block's shared memory, has in that of block `rank` of
// the cluster.
__device__ __forceinline__ uint32 cluster_address(const void* local, uint32 rank) {
    uint32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(local))), "r"(rank));
    return address;
}

// A number in the shared memory of a block of the cluster.
__device__ __forceinline__ float cluster_load(uint32 address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void cluster_store(uint32 address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" : : "r"(address), "f"(value) : "memory");
}
