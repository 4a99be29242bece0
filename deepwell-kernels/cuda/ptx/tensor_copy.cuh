// cp.async.bulk.tensor: TMA copy of a box of a matrix to shared memory, issued by one thread.
// Elements outside the matrix become zeros.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

// Tensor map as the driver encodes it; passed as a `__grid_constant__` argument.
struct alignas(64) TensorMap {
    uint64 words[16];
};

// Copies the box that begins at (row, column) to `target`, 128-byte aligned. `barrier`, an address
// in shared memory, counts the bytes of a whole box.
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

// Multicasts a box to the same offset in all `ctas` of the cluster (one bit per rank). In each CTA
// the barrier with the offset of `barrier` counts the bytes.
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

// Copies a box for one CTA of a pair: `barrier` is a cluster address and may be the peer's.
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

// Multicasts a box to the same offset in all `ctas` of the cluster (one bit per rank). Bytes for a
// CTA are counted by a barrier in its pair, with the offset of `barrier`: in the even or the odd
// CTA of the pair, as `barrier` itself.
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

// Orders this thread's shared memory accesses before bulk copies issued after a barrier.
__device__ __forceinline__ void fence_before_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
