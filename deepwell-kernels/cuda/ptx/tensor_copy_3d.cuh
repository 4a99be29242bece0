// cp.async.bulk.tensor in three dimensions: TMA copy of a box to shared memory, issued by one
// thread. Elements outside the tensor become zeros.
#pragma once

#include "common/types.cuh"
#include "ptx/tensor_copy.cuh"

// Copies the box that begins at element `x` of row `y` of matrix `z` to `target`, 128-byte aligned.
// `barrier`, an address in shared memory, counts the bytes of a whole box; in a CTA pair it is a
// cluster address and may be the peer's.
template <int kCtas>
__device__ __forceinline__ void tensor_copy_3d(void* target, const TensorMap& map, uint32 x,
                                               uint32 y, uint32 z, uint32 barrier) {
    const uint32 place = static_cast<uint32>(__cvta_generic_to_shared(target));
    if constexpr (kCtas == 1) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4}], [%5];"
            :
            : "r"(place), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.cta_group::2.shared::cluster.global.tile"
            ".mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
            :
            : "r"(place), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
            : "memory");
    }
}
