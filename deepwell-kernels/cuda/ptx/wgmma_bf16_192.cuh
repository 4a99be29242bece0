// wgmma of BF16 with 192 columns: functions of ptx/wgmma_bf16.cuh for sums of this width.
//
// A template that calls `wgmma_bf16` sees only the functions that are declared before the template,
// so kernels include this header before others.
#pragma once

#include "common/types.cuh"
#include "ptx/wgmma_bf16.cuh"

#define WGMMA_BF16_REGISTERS_96                                                                   \
    "{"                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "            \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "            \
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "            \
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "            \
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "            \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                        \
    "}"
#define WGMMA_BF16_OPERANDS_96(constraint, d)                                                     \
    constraint((d)[0]), constraint((d)[1]), constraint((d)[2]), constraint((d)[3]),               \
    constraint((d)[4]), constraint((d)[5]), constraint((d)[6]), constraint((d)[7]),               \
    constraint((d)[8]), constraint((d)[9]), constraint((d)[10]), constraint((d)[11]),             \
    constraint((d)[12]), constraint((d)[13]), constraint((d)[14]), constraint((d)[15]),           \
    constraint((d)[16]), constraint((d)[17]), constraint((d)[18]), constraint((d)[19]),           \
    constraint((d)[20]), constraint((d)[21]), constraint((d)[22]), constraint((d)[23]),           \
    constraint((d)[24]), constraint((d)[25]), constraint((d)[26]), constraint((d)[27]),           \
    constraint((d)[28]), constraint((d)[29]), constraint((d)[30]), constraint((d)[31]),           \
    constraint((d)[32]), constraint((d)[33]), constraint((d)[34]), constraint((d)[35]),           \
    constraint((d)[36]), constraint((d)[37]), constraint((d)[38]), constraint((d)[39]),           \
    constraint((d)[40]), constraint((d)[41]), constraint((d)[42]), constraint((d)[43]),           \
    constraint((d)[44]), constraint((d)[45]), constraint((d)[46]), constraint((d)[47]),           \
    constraint((d)[48]), constraint((d)[49]), constraint((d)[50]), constraint((d)[51]),           \
    constraint((d)[52]), constraint((d)[53]), constraint((d)[54]), constraint((d)[55]),           \
    constraint((d)[56]), constraint((d)[57]), constraint((d)[58]), constraint((d)[59]),           \
    constraint((d)[60]), constraint((d)[61]), constraint((d)[62]), constraint((d)[63]),           \
    constraint((d)[64]), constraint((d)[65]), constraint((d)[66]), constraint((d)[67]),           \
    constraint((d)[68]), constraint((d)[69]), constraint((d)[70]), constraint((d)[71]),           \
    constraint((d)[72]), constraint((d)[73]), constraint((d)[74]), constraint((d)[75]),           \
    constraint((d)[76]), constraint((d)[77]), constraint((d)[78]), constraint((d)[79]),           \
    constraint((d)[80]), constraint((d)[81]), constraint((d)[82]), constraint((d)[83]),           \
    constraint((d)[84]), constraint((d)[85]), constraint((d)[86]), constraint((d)[87]),           \
    constraint((d)[88]), constraint((d)[89]), constraint((d)[90]), constraint((d)[91]),           \
    constraint((d)[92]), constraint((d)[93]), constraint((d)[94]), constraint((d)[95])

#define WGMMA_BF16_192(predicate, constraint, a_registers, a_operands, last)                      \
    asm volatile("{\n"                                                                            \
                 ".reg .pred p;\n" predicate                                                      \
                 " p, 0, 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " WGMMA_BF16_REGISTERS_96 \
                 ", " a_registers ", p, 1, 1, " last ";\n"                                        \
                 "}"                                                                              \
                 : WGMMA_BF16_OPERANDS_96(constraint, sums)                                       \
                 : a_operands, "l"(b), "n"(kColumns ? 1 : 0)                                      \
                 : "memory")
#define WGMMA_BF16_A_SHARED "l"(a), "n"(kColumnsOfA ? 1 : 0)
#define WGMMA_BF16_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

template <bool kAdd, bool kColumns, bool kColumnsOfA>
__device__ __forceinline__ void wgmma_bf16(float (&sums)[96], uint64 a, uint64 b) {
    if constexpr (kAdd) {
        WGMMA_BF16_192("setp.eq.u32", "+f", "%96, %98", WGMMA_BF16_A_SHARED, "%97, %99");
    } else {
        WGMMA_BF16_192("setp.ne.u32", "=f", "%96, %98", WGMMA_BF16_A_SHARED, "%97, %99");
    }
}

template <bool kAdd, bool kColumns>
__device__ __forceinline__ void wgmma_bf16(float (&sums)[96], const uint32 (&a)[4], uint64 b) {
    if constexpr (kAdd) {
        WGMMA_BF16_192("setp.eq.u32", "+f", "{%96, %97, %98, %99}, %100",
                       WGMMA_BF16_A_REGISTERS, "%101");
    } else {
        WGMMA_BF16_192("setp.ne.u32", "=f", "{%96, %97, %98, %99}, %100",
                       WGMMA_BF16_A_REGISTERS, "%101");
    }
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait_for(float (&sums)[96]) {
    asm volatile("wgmma.wait_group.sync.aligned %96;"
                 : WGMMA_BF16_OPERANDS_96("+f", sums)
                 : "n"(kPending)
                 : "memory");
}

#undef WGMMA_BF16_192
#undef WGMMA_BF16_A_SHARED
#undef WGMMA_BF16_A_REGISTERS
#undef WGMMA_BF16_REGISTERS_96
#undef WGMMA_BF16_OPERANDS_96
