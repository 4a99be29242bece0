// tcgen05: the tensor cores of sm_100 and sm_103, with tensor memory of 128 lanes and 512 columns
// of 32 bits. A tensor memory address has the lane in its upper half and the column in its lower
// half. `kCtas` is 1, or 2 if a CTA pair computes one MMA.
#pragma once

#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

// Selects the instruction for one CTA or for a CTA pair.
#define TCGEN05_BY_CTAS(before, after, ...)                                                      \
    if constexpr (kCtas == 1) {                                                                  \
        asm volatile(before ".cta_group::1" after __VA_ARGS__);                                  \
    } else {                                                                                     \
        asm volatile(before ".cta_group::2" after __VA_ARGS__);                                  \
    }

// By one warp (of each CTA of a pair): allocates all columns and writes their address to `target`
// in shared memory.
template <int kCtas>
__device__ __forceinline__ void tcgen05_allocate_all(uint32* target) {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(target));
    TCGEN05_BY_CTAS("tcgen05.alloc", ".sync.aligned.shared::cta.b32 [%0], 512;",
                      : : "r"(address) : "memory")
    TCGEN05_BY_CTAS("tcgen05.relinquish_alloc_permit", ".sync.aligned;", ::: "memory")
}

// By the warp that allocated: frees all columns.
template <int kCtas>
__device__ __forceinline__ void tcgen05_free_all(uint32 address) {
    TCGEN05_BY_CTAS("tcgen05.dealloc", ".sync.aligned.b32 %0, 512;", : : "r"(address) : "memory")
}

// Copies 32 rows of 16 bytes to four columns of each of the four groups of 32 lanes; for a CTA
// pair, in each CTA.
template <int kCtas>
__device__ __forceinline__ void tcgen05_copy_to_all_warps(uint32 target, uint64 source) {
    TCGEN05_BY_CTAS("tcgen05.cp", ".32x128b.warpx4 [%0], %1;",
                      : : "r"(target), "l"(source) : "memory")
}

// target (+)= a b^T over 32 elements of 8 bits along K, with one scale for all 32.
template <int kCtas>
__device__ __forceinline__ void tcgen05_multiply_mxf8(uint32 target, uint64 a, uint64 b,
                                                      uint32 instruction, uint32 a_scales,
                                                      uint32 b_scales, bool accumulate) {
    const uint32 add = accumulate;
    TCGEN05_BY_CTAS(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma",
        ".kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n"
        "}",
        :
        : "r"(target), "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(add)
        : "memory")
}

// target (+)= a b^T over 64 elements of 4 bits along K, with four scales for 16 each.
template <int kCtas>
__device__ __forceinline__ void tcgen05_multiply_nvf4(uint32 target, uint64 a, uint64 b,
                                                      uint32 instruction, uint32 a_scales,
                                                      uint32 b_scales, bool accumulate) {
    const uint32 add = accumulate;
    TCGEN05_BY_CTAS(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma",
        ".kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n"
        "}",
        :
        : "r"(target), "l"(a), "l"(b), "r"(instruction), "r"(a_scales), "r"(b_scales), "r"(add)
        : "memory")
}

// target (+)= a b^T over 16 elements of 16 bits along K.
template <int kCtas>
__device__ __forceinline__ void tcgen05_multiply_f16(uint32 target, uint64 a, uint64 b,
                                                     uint32 instruction, bool accumulate) {
    const uint32 add = accumulate;
    TCGEN05_BY_CTAS(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma",
        ".kind::f16 [%0], %1, %2, %3, p;\n"
        "}",
        :
        : "r"(target), "l"(a), "l"(b), "r"(instruction), "r"(add)
        : "memory")
}

// target (+)= a b^T over 16 elements of 16 bits along K, by one CTA. `a` is in tensor memory: a row
// in each of 128 lanes, two elements in each of eight columns.
__device__ __forceinline__ void tcgen05_multiply_f16_from_tensor(uint32 target, uint32 a, uint64 b,
                                                                 uint32 instruction,
                                                                 bool accumulate) {
    const uint32 add = accumulate;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], [%1], %2, %3, p;\n"
        "}"
        :
        : "r"(target), "r"(a), "l"(b), "r"(instruction), "r"(add)
        : "memory");
}

// Arrives at `barrier` when all earlier tcgen05 operations of this thread have completed.
__device__ __forceinline__ void tcgen05_commit(uint64* barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 :
                 : "r"(mbarrier_address(barrier))
                 : "memory");
}

// The same for MMAs of a CTA pair, at the barriers with the offset of `barrier` in all `ctas` of
// the cluster (one bit per rank).
__device__ __forceinline__ void tcgen05_commit_pair(uint64* barrier, uint16 ctas) {
    asm volatile(
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
        ".multicast::cluster.b64 [%0], %1;"
        :
        : "r"(mbarrier_address(barrier)), "h"(ctas)
        : "memory");
}

// Loads 32 columns of the calling warp's 32 lanes, one lane per thread; valid after
// tcgen05_wait_load.
__device__ __forceinline__ void tcgen05_load_32_columns(uint32 (&values)[32], uint32 address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3]), "=r"(values[4]),
          "=r"(values[5]), "=r"(values[6]), "=r"(values[7]), "=r"(values[8]), "=r"(values[9]),
          "=r"(values[10]), "=r"(values[11]), "=r"(values[12]), "=r"(values[13]),
          "=r"(values[14]), "=r"(values[15]), "=r"(values[16]), "=r"(values[17]),
          "=r"(values[18]), "=r"(values[19]), "=r"(values[20]), "=r"(values[21]),
          "=r"(values[22]), "=r"(values[23]), "=r"(values[24]), "=r"(values[25]),
          "=r"(values[26]), "=r"(values[27]), "=r"(values[28]), "=r"(values[29]),
          "=r"(values[30]), "=r"(values[31])
        : "r"(address)
        : "memory");
}

__device__ __forceinline__ void tcgen05_wait_load() {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// Stores 16 columns of the calling warp's 32 lanes, one lane per thread; complete after
// tcgen05_wait_store.
__device__ __forceinline__ void tcgen05_store_16_columns(uint32 address,
                                                         const uint32 (&values)[16]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};"
        :
        : "r"(address), "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]),
          "r"(values[4]), "r"(values[5]), "r"(values[6]), "r"(values[7]), "r"(values[8]),
          "r"(values[9]), "r"(values[10]), "r"(values[11]), "r"(values[12]), "r"(values[13]),
          "r"(values[14]), "r"(values[15])
        : "memory");
}

// The same for 32 columns.
__device__ __forceinline__ void tcgen05_store_32_columns(uint32 address,
                                                         const uint32 (&values)[32]) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x32.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32};"
        :
        : "r"(address), "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3]),
          "r"(values[4]), "r"(values[5]), "r"(values[6]), "r"(values[7]), "r"(values[8]),
          "r"(values[9]), "r"(values[10]), "r"(values[11]), "r"(values[12]), "r"(values[13]),
          "r"(values[14]), "r"(values[15]), "r"(values[16]), "r"(values[17]), "r"(values[18]),
          "r"(values[19]), "r"(values[20]), "r"(values[21]), "r"(values[22]), "r"(values[23]),
          "r"(values[24]), "r"(values[25]), "r"(values[26]), "r"(values[27]), "r"(values[28]),
          "r"(values[29]), "r"(values[30]), "r"(values[31])
        : "memory");
}

__device__ __forceinline__ void tcgen05_wait_store() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// Orders earlier tcgen05 operations of this thread before operations of threads after a barrier.
__device__ __forceinline__ void tcgen05_fence_before_barrier() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_fence_after_barrier() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

#undef TCGEN05_BY_CTAS
