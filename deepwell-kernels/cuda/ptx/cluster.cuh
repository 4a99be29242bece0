// CTAs of a cluster.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32 cluster_rank() {
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Where CTA `rank` of the cluster has what lies at `address` of shared memory here.
__device__ __forceinline__ uint32 cluster_address(uint32 address, uint32 rank) {
    uint32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// All threads of the cluster; what they wrote before is then visible to each other.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
