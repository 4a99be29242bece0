// mbarrier: waiting in shared memory for bulk copies, tensor cores and threads. A barrier has a
// phase bit, 0 before the first phase ends; a phase is so many arrivals and the bytes that they
// announce.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32 mbarrier_address(const uint64* barrier) {
    return static_cast<uint32>(__cvta_generic_to_shared(barrier));
}

// By one thread, before anybody uses the barrier; others after `mbarrier_publish` and a barrier of
// threads. A phase ends after `arrivals`.
__device__ __forceinline__ void mbarrier_set(uint64* barrier, uint32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(mbarrier_address(barrier)), "r"(arrivals)
                 : "memory");
}

// What this thread has set is there for the cluster and for copies.
__device__ __forceinline__ void mbarrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Both, for one barrier.
__device__ __forceinline__ void mbarrier_init(uint64* barrier, uint32 arrivals = 1) {
    mbarrier_set(barrier, arrivals);
    mbarrier_publish();
}

// Arrives and announces `bytes` that copies bring.
__device__ __forceinline__ void mbarrier_expect(uint64* barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(mbarrier_address(barrier)), "r"(bytes)
                 : "memory");
}

// What this thread did before is there for those who wait.
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64* barrier) {
    mbarrier_arrive(mbarrier_address(barrier));
}

// The same at a barrier of any CTA of the cluster, by its address there (`cluster_address`).
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                 :
                 : "r"(barrier)
                 : "memory");
}

// The same for shared memory alone: it waits for nothing that this thread did to global memory.
__device__ __forceinline__ void mbarrier_arrive_cluster_shared(uint32 barrier) {
    asm volatile(
        "fence.release.sync_restrict::shared::cta.cluster;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];"
        :
        : "r"(barrier)
        : "memory");
}

// Whether the phase with bit `phase` has ended, as far as a short wait shows; what those who
// arrived did before is there then.
__device__ __forceinline__ bool mbarrier_is_over(uint32 barrier, uint32 phase) {
    uint32 done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(done)
        : "r"(barrier), "r"(phase)
        : "memory");
    return done != 0;
}

// Waits for the end of the phase with bit `phase`.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, uint32 phase) {
    while (!mbarrier_is_over(barrier, phase)) {
    }
}

__device__ __forceinline__ void mbarrier_wait(uint64* barrier, uint32 phase) {
    mbarrier_wait(mbarrier_address(barrier), phase);
}

// The same, where other CTAs of the cluster arrive.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64* barrier, uint32 phase) {
    uint32 done = 0;
    while (done == 0) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(mbarrier_address(barrier)), "r"(phase)
            : "memory");
    }
}

// The same for shared memory alone: the L1 cache keeps what it has of global memory.
__device__ __forceinline__ void mbarrier_wait_cluster_shared(uint32 barrier, uint32 phase) {
    uint32 done = 0;
    while (done == 0) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(phase)
            : "memory");
    }
    asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}
