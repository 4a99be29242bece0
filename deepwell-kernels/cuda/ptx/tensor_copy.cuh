// cp.async.bulk.tensor: one thread has a box of a matrix copied to shared memory; what lies beyond
// the matrix becomes zeros.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

// A tensor map as the driver encodes it, a `__grid_constant__` argument.
struct alignas(64) TensorMap {
    uint64 words[16];
};

// The box whose first element is (row, column), to `target`, 128-byte aligned. `barrier`, an
// address in shared memory, counts the bytes of a whole box.
__device__ __forceinline__ void tensor_copy_2d(void* target, const TensorMap& map, uint32 column,
                                               uint32 row, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(&map), "r"(column),
          "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void tensor_copy_2d(void* target, const TensorMap& map, uint32 column,
                                               uint32 row, uint64* barrier) {
    tensor_copy_2d(target, map, column, row, mbarrier_address(barrier));
}

// The same to the same place in all `ctas` of the cluster, a bit for each rank; the bytes are
// counted by the barrier that lies there as `barrier` does here.
__device__ __forceinline__ void tensor_copy_2d_multicast(void* target, const TensorMap& map,
                                                         uint32 column, uint32 row,
                                                         uint64* barrier, uint16 ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(&map), "r"(column),
          "r"(row), "r"(mbarrier_address(barrier)), "h"(ctas)
        : "memory");
}

// The same for a CTA of a pair: `barrier` is an address in the cluster and may be the peer's.
__device__ __forceinline__ void tensor_copy_2d_pair(void* target, const TensorMap& map,
                                                    uint32 column, uint32 row, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(&map), "r"(column),
          "r"(row), "r"(barrier)
        : "memory");
}

// The same to the same place in all `ctas` of the cluster, a bit for each rank; the bytes are
// counted by the barrier that lies as `barrier` does, in the first or second CTA of each one's
// pair as it.
__device__ __forceinline__ void tensor_copy_2d_pairs(void* target, const TensorMap& map,
                                                     uint32 column, uint32 row, uint32 barrier,
                                                     uint16 ctas) {
    asm volatile(
        "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.tile"
        ".mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        :
        : "r"(static_cast<uint32>(__cvta_generic_to_shared(target))), "l"(&map), "r"(column),
          "r"(row), "r"(barrier), "h"(ctas)
        : "memory");
}

// What this thread did to shared memory comes before bulk copies that are started after a barrier.
__device__ __forceinline__ void fence_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
