// ldmatrix: one warp loads 8 x 8 matrices of 16-bit elements from shared memory.
//
// Lanes 8j to 8j + 7 give the row addresses (16-byte aligned) of matrix j. Register j of lane l
// then holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4; with `.trans`, of column l / 4. A
// row of 16 bytes may also be sixteen 8-bit elements (not transposed).
#pragma once

#include "common/types.cuh"

// Converts a generic pointer to a shared-memory address.
__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Four matrices.
__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Four matrices, each transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
