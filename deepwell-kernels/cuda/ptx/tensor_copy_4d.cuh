// cp.async.bulk.tensor in four dimensions: TMA copies of a box to and from shared memory, issued by
// one thread. Elements outside the tensor become zeros on loads and are skipped on stores.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"

// First element of a box, innermost dimension first.
struct TensorPlace {
    uint32 at[4];
};

// Loads the box at `place` to `target`, 128-byte aligned. `barrier` counts the bytes of a whole
// box.
__device__ __forceinline__ void tensor_copy_4d(void* target, const TensorMap& map,
                                               const TensorPlace& place, uint64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(&map),
          "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]),
          "r"(mbarrier_address(barrier))
        : "memory");
}

// Stores the box at `place` from `source`, as part of this thread's open bulk group.
__device__ __forceinline__ void tensor_store_4d(const TensorMap& map, const TensorPlace& place,
                                                const void* source) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
        :
        : "l"(&map), "r"(place.at[0]), "r"(place.at[1]), "r"(place.at[2]), "r"(place.at[3]),
          "r"(static_cast<uint32>(__cvta_generic_to_shared(source)))
        : "memory");
}

// Closes the group of stores that this thread has issued since the previous group.
__device__ __forceinline__ void tensor_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all stores of this thread have read shared memory, which may then be overwritten.
__device__ __forceinline__ void tensor_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
