// cp.async.bulk: one thread has contiguous bytes copied to shared memory.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

// `bytes` from global memory; they and both addresses are multiples of 16. `barrier` counts them.
__device__ __forceinline__ void bulk_copy(void* target, const void* source, uint32 bytes,
                                          uint64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(source), "r"(bytes),
          "r"(mbarrier_address(barrier))
        : "memory");
}
