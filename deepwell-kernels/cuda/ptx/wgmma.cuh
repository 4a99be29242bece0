// wgmma: the tensor cores of sm_90a. A warpgroup multiplies matrices in shared memory into
// registers; the result is valid after `wgmma_wait`.
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of a result of 64 rows. For each group of
// eight columns 8 j, lane l holds columns 8 j + l % 4 * 2 and 8 j + l % 4 * 2 + 1: of row l / 4 in
// values 4 j and 4 j + 1, and of row 8 + l / 4 in values 4 j + 2 and 4 j + 3.
#pragma once

#include "common/types.cuh"

// Orders this warpgroup's register accesses before the wgmma instructions that follow.
__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Closes the group of wgmma instructions issued since the previous group.
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#define WGMMA_64_REGISTERS \
    "{" \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18," \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35," \
    "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52," \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
    "}"
#define WGMMA_64_OPERANDS(constraint, d) \
    constraint((d)[0]), constraint((d)[1]), constraint((d)[2]), constraint((d)[3]), \
    constraint((d)[4]), constraint((d)[5]), constraint((d)[6]), constraint((d)[7]), \
    constraint((d)[8]), constraint((d)[9]), constraint((d)[10]), constraint((d)[11]), \
    constraint((d)[12]), constraint((d)[13]), constraint((d)[14]), constraint((d)[15]), \
    constraint((d)[16]), constraint((d)[17]), constraint((d)[18]), constraint((d)[19]), \
    constraint((d)[20]), constraint((d)[21]), constraint((d)[22]), constraint((d)[23]), \
    constraint((d)[24]), constraint((d)[25]), constraint((d)[26]), constraint((d)[27]), \
    constraint((d)[28]), constraint((d)[29]), constraint((d)[30]), constraint((d)[31]), \
    constraint((d)[32]), constraint((d)[33]), constraint((d)[34]), constraint((d)[35]), \
    constraint((d)[36]), constraint((d)[37]), constraint((d)[38]), constraint((d)[39]), \
    constraint((d)[40]), constraint((d)[41]), constraint((d)[42]), constraint((d)[43]), \
    constraint((d)[44]), constraint((d)[45]), constraint((d)[46]), constraint((d)[47]), \
    constraint((d)[48]), constraint((d)[49]), constraint((d)[50]), constraint((d)[51]), \
    constraint((d)[52]), constraint((d)[53]), constraint((d)[54]), constraint((d)[55]), \
    constraint((d)[56]), constraint((d)[57]), constraint((d)[58]), constraint((d)[59]), \
    constraint((d)[60]), constraint((d)[61]), constraint((d)[62]), constraint((d)[63])

// sums (+)= a b^T over 64 rows, 128 columns and 32 E4M3 along K, both operands K-major.
template <bool kAdd>
__device__ __forceinline__ void wgmma_m64n128k32_e4m3(float (&sums)[64], uint64 a, uint64 b) {
    if constexpr (kAdd) {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.eq.u32 p, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " WGMMA_64_REGISTERS
            ", %64, %65, p, 1, 1;\n"
            "}"
            : WGMMA_64_OPERANDS("+f", sums)
            : "l"(a), "l"(b)
            : "memory");
    } else {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.u32 p, 0, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " WGMMA_64_REGISTERS
            ", %64, %65, p, 1, 1;\n"
            "}"
            : WGMMA_64_OPERANDS("=f", sums)
            : "l"(a), "l"(b)
            : "memory");
    }
}

// Waits for all groups of this warpgroup, after which `sums` are valid.
__device__ __forceinline__ void wgmma_wait(float (&sums)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;"
                 : WGMMA_64_OPERANDS("+f", sums)
                 :
                 : "memory");
}

// Marks `sums` as valid, after a wait for another accumulator of the same group.
__device__ __forceinline__ void wgmma_waited(float (&sums)[64]) {
    asm volatile("" : WGMMA_64_OPERANDS("+f", sums) : : "memory");
}

// Waits until at most `kPending` groups of this warpgroup are in flight, without touching
// accumulators: the operands of completed groups may be overwritten.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_read() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

#undef WGMMA_64_REGISTERS
#undef WGMMA_64_OPERANDS
