// ldmatrix: one warp loads 8 x 8 matrices of 16-bit elements from shared memory.
//
// Lanes 8j to 8j + 7 give the addresses (16-byte aligned) of the rows of matrix j. Register j of
// lane l then holds row l / 4, elements 2 (l % 4) and the next; transposed: column l / 4, elements
// 2 (l % 4) and the next. A row of 16 bytes may as well be sixteen 8-bit elements (not transposed).
#pragma once

#include "common/types.cuh"

// The address in shared memory that a generic pointer stands for.
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
