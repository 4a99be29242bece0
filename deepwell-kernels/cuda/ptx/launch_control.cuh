// Cluster launch control: a cluster that runs takes over the work of one that has not begun, which
// then never begins.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

// By one thread of a cluster of `kBlocks`: asks for a cluster. The answer of 16 bytes comes to the
// same place in each block of the cluster, and a barrier there counts its bytes. Who got an answer
// that there was none must not ask again.
template <int kBlocks>
__device__ __forceinline__ void claim_cluster(uint4* answer, uint64* barrier) {
    const uint32 target = static_cast<uint32>(__cvta_generic_to_shared(answer));
    if constexpr (kBlocks == 1) {
        asm volatile(
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
            "[%0], [%1];"
            :
            : "r"(target), "r"(mbarrier_address(barrier))
            : "memory");
    } else {
        asm volatile(
            "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
            ".multicast::cluster::all.b128 [%0], [%1];"
            :
            : "r"(target), "r"(mbarrier_address(barrier))
            : "memory");
    }
}

// Whether an answer gives a cluster, and the first block of it along x.
__device__ __forceinline__ bool claimed_cluster(const uint4* answer, uint32& block) {
    uint32 is_there;
    asm volatile(
        "{\n"
        ".reg .b128 answer;\n"
        ".reg .pred p;\n"
        "ld.shared.b128 answer, [%2];\n"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "mov.u32 %1, 0;\n"
        "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer;\n"
        "}"
        : "=r"(is_there), "=r"(block)
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(answer)))
        : "memory");
    return is_there != 0;
}
