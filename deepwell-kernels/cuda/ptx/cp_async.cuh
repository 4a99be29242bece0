// cp.async: asynchronous copies from global to shared memory, issued and awaited by each thread.
#pragma once

#include "common/types.cuh"

// Copies `bytes` (0 to 16) of 16 and zero-fills the rest; reads nothing if `bytes` is 0. Both
// addresses are 16-byte aligned. Bypasses the L1 cache.
__device__ __forceinline__ void cp_async_16(uint32 shared, const void* global, uint32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// The same for 8 bytes, through the L1 cache. Both addresses are 8-byte aligned.
__device__ __forceinline__ void cp_async_8(uint32 shared, const void* global, uint32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;"
                 :
                 : "r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// The same for 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32 shared, const void* global, uint32 bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(shared), "l"(global), "r"(bytes)
                 : "memory");
}

// Closes the group of copies that this thread has issued since the previous group; it may be empty.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's newest groups are in flight. Other threads see
// the bytes after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
