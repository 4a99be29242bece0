// Thread block clusters.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Maps `address` of this CTA's shared memory to the same offset in CTA `rank` of the cluster.
__device__ __forceinline__ uint32 cluster_address(uint32 address, uint32 rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Cluster barrier for all threads of the cluster. Writes before the barrier are visible after it.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
