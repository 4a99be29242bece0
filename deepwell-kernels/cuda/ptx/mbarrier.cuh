// mbarrier: waiting in shared memory for bulk copies, tensor cores and threads. The phase bit is 0
// until the first phase completes. A phase completes after a set number of arrivals and after the
// bytes that the arrivals announced.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ uint32 mbarrier_address(const uint64* barrier) {
    return static_cast<uint32>(__cvta_generic_to_shared(barrier));
}

// Initializes the barrier, by one thread and before any use. Other threads may use the barrier
// after `mbarrier_publish` and a thread barrier. A phase completes after `arrivals`.
__device__ __forceinline__ void mbarrier_set(uint64* barrier, uint32 arrivals = 1) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                 :
                 : "r"(mbarrier_address(barrier)), "r"(arrivals)
                 : "memory");
}

// Makes this thread's initialized barriers visible to the cluster and to the async proxy.
__device__ __forceinline__ void mbarrier_publish() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Initializes and publishes one barrier.
__device__ __forceinline__ void mbarrier_init(uint64* barrier, uint32 arrivals = 1) {
    mbarrier_set(barrier, arrivals);
    mbarrier_publish();
}

// Arrives and announces `bytes` of asynchronous copies.
__device__ __forceinline__ void mbarrier_expect(uint64* barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(mbarrier_address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrives with release semantics: earlier writes of this thread are visible to waiting threads.
__device__ __forceinline__ void mbarrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64* barrier) {
    mbarrier_arrive(mbarrier_address(barrier));
}

// Arrives at a barrier of any CTA of the cluster, by its cluster address (`cluster_address`).
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32 barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
                 :
                 : "r"(barrier)
                 : "memory");
}

// Arrives, releasing only shared memory: does not wait for this thread's global memory operations.
__device__ __forceinline__ void mbarrier_arrive_cluster_shared(uint32 barrier) {
    asm volatile(
        "fence.release.sync_restrict::shared::cta.cluster;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];"
        :
        : "r"(barrier)
        : "memory");
}

// Returns whether the phase with bit `phase` has completed, after a short wait in hardware. If so,
// memory operations that precede the arrivals are visible.
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

// Waits for completion of the phase with bit `phase`.
__device__ __forceinline__ void mbarrier_wait(uint32 barrier, uint32 phase) {
    while (!mbarrier_is_over(barrier, phase)) {
    }
}

__device__ __forceinline__ void mbarrier_wait(uint64* barrier, uint32 phase) {
    mbarrier_wait(mbarrier_address(barrier), phase);
}

// Waits for a barrier at which other CTAs of the cluster arrive.
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

// The same, acquiring only shared memory: the L1 cache keeps its lines of global memory.
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

// Waits for completion of a barrier's first phase, of a barrier that has no other.
__device__ __forceinline__ void mbarrier_wait_once(uint64* barrier) {
    uint32 done = 0;
    while (done == 0) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(mbarrier_address(barrier))
            : "memory");
    }
}
