// cp.async.bulk: a copy of contiguous bytes to shared memory, issued by one thread.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

// Copies `bytes` from global memory; size and both addresses are multiples of 16. `barrier` counts
// the bytes.
__device__ __forceinline__ void bulk_copy(void* target, const void* source, uint32 bytes,
                                          uint64* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(source), "r"(bytes),
          "r"(mbarrier_address(barrier))
        : "memory");
}
