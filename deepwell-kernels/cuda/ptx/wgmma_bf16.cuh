// wgmma of BF16: 64 rows of `a` in shared memory or in registers, `b` in shared memory, sums in
// FP32.
//
// Accumulators have the layout of ptx/wgmma.cuh. With `a` in registers, lane l of warp w holds four
// pairs of elements for each step of 16 along K: elements 2 (l % 4) and 2 (l % 4) + 1 of rows 16 w
// + l / 4 and 16 w + l / 4 + 8, then of the same rows eight elements further along K. Two
// neighbouring groups of eight accumulator columns have this layout after rounding to BF16.
//
// `wgmma_fence` is required between register writes of other instructions and the wgmma that use
// the registers, `wgmma_wait_for` between wgmma and the first use of their sums.
#pragma once

#include "common/types.cuh"
#include "ptx/wgmma.cuh"

#define WGMMA_BF16_REGISTERS_32                                                                   \
    "{"                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                             \
    "}"
#define WGMMA_BF16_REGISTERS_48                                                                   \
    "{"                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "       \
    "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"                                  \
    "}"
#define WGMMA_BF16_REGISTERS_64                                                                   \
    "{"                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "       \
    "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "       \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                                       \
    "}"
#define WGMMA_BF16_REGISTERS_128                                                                  \
    "{"                                                                                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, "       \
    "%36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "       \
    "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "       \
    "%70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, "       \
    "%87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, "         \
    "%103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "        \
    "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                            \
    "}"
#define WGMMA_BF16_OPERANDS_32(constraint, d)                                                     \
    constraint((d)[0]), constraint((d)[1]), constraint((d)[2]), constraint((d)[3]),               \
    constraint((d)[4]), constraint((d)[5]), constraint((d)[6]), constraint((d)[7]),               \
    constraint((d)[8]), constraint((d)[9]), constraint((d)[10]), constraint((d)[11]),             \
    constraint((d)[12]), constraint((d)[13]), constraint((d)[14]), constraint((d)[15]),           \
    constraint((d)[16]), constraint((d)[17]), constraint((d)[18]), constraint((d)[19]),           \
    constraint((d)[20]), constraint((d)[21]), constraint((d)[22]), constraint((d)[23]),           \
    constraint((d)[24]), constraint((d)[25]), constraint((d)[26]), constraint((d)[27]),           \
    constraint((d)[28]), constraint((d)[29]), constraint((d)[30]), constraint((d)[31])
#define WGMMA_BF16_OPERANDS_48(constraint, d)                                                     \
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
    constraint((d)[44]), constraint((d)[45]), constraint((d)[46]), constraint((d)[47])
#define WGMMA_BF16_OPERANDS_64(constraint, d)                                                     \
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
    constraint((d)[60]), constraint((d)[61]), constraint((d)[62]), constraint((d)[63])
#define WGMMA_BF16_OPERANDS_128(constraint, d)                                                    \
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
    constraint((d)[92]), constraint((d)[93]), constraint((d)[94]), constraint((d)[95]),           \
    constraint((d)[96]), constraint((d)[97]), constraint((d)[98]), constraint((d)[99]),           \
    constraint((d)[100]), constraint((d)[101]), constraint((d)[102]), constraint((d)[103]),       \
    constraint((d)[104]), constraint((d)[105]), constraint((d)[106]), constraint((d)[107]),       \
    constraint((d)[108]), constraint((d)[109]), constraint((d)[110]), constraint((d)[111]),       \
    constraint((d)[112]), constraint((d)[113]), constraint((d)[114]), constraint((d)[115]),       \
    constraint((d)[116]), constraint((d)[117]), constraint((d)[118]), constraint((d)[119]),       \
    constraint((d)[120]), constraint((d)[121]), constraint((d)[122]), constraint((d)[123]),       \
    constraint((d)[124]), constraint((d)[125]), constraint((d)[126]), constraint((d)[127])

#define WGMMA_BF16(kN, kSums, predicate, constraint, a_registers, a_operands, last)               \
    asm volatile("{\n"                                                                            \
                 ".reg .pred p;\n" predicate                                                      \
                 " p, 0, 0;\n"                                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #kN                                          \
                 "k16.f32.bf16.bf16 " WGMMA_BF16_REGISTERS_##kSums ", " a_registers               \
                 ", p, 1, 1, " last ";\n"                                                         \
                 "}"                                                                              \
                 : WGMMA_BF16_OPERANDS_##kSums(constraint, sums)                                  \
                 : a_operands, "l"(b), "n"(kColumns ? 1 : 0)                                      \
                 : "memory")
#define WGMMA_BF16_A_SHARED "l"(a), "n"(kColumnsOfA ? 1 : 0)
#define WGMMA_BF16_A_REGISTERS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

// wgmma_bf16: sums (+)= a b^T over 64 rows, kN columns and 16 along K, with `a` in shared memory or
// in registers. Matrices in shared memory are K-major unless `kColumns` (for b) or `kColumnsOfA` is
// set: then `b` is N-major, or `a` is M-major.
//
// wgmma_bf16_columns: sums += a b^T, with `a` M-major and `b` N-major.
//
// wgmma_wait_for: waits until at most `kPending` groups of this warpgroup are in flight; `sums`
// belong to a completed group.
#define WGMMA_BF16_FUNCTIONS(kN, kSums, n0, n1, n2, n3, n4, n5)                                   \
    template <bool kAdd, bool kColumns, bool kColumnsOfA = false>                                 \
    __device__ __forceinline__ void wgmma_bf16(float (&sums)[kSums], uint64 a, uint64 b) {        \
        if constexpr (kAdd) {                                                                     \
            WGMMA_BF16(kN, kSums, "setp.eq.u32", "+f", n0 ", " n2, WGMMA_BF16_A_SHARED,           \
                       n1 ", " n3);                                                               \
        } else {                                                                                  \
            WGMMA_BF16(kN, kSums, "setp.ne.u32", "=f", n0 ", " n2, WGMMA_BF16_A_SHARED,           \
                       n1 ", " n3);                                                               \
        }                                                                                         \
    }                                                                                             \
    __device__ __forceinline__ void wgmma_bf16_columns(float (&sums)[kSums], uint64 a,            \
                                                       uint64 b) {                                \
        wgmma_bf16<true, true, true>(sums, a, b);                                                 \
    }                                                                                             \
    template <bool kAdd, bool kColumns>                                                           \
    __device__ __forceinline__ void wgmma_bf16(float (&sums)[kSums], const uint32 (&a)[4],        \
                                               uint64 b) {                                        \
        if constexpr (kAdd) {                                                                     \
            WGMMA_BF16(kN, kSums, "setp.eq.u32", "+f",                                            \
                       "{" n0 ", " n1 ", " n2 ", " n3 "}, " n4, WGMMA_BF16_A_REGISTERS, n5);      \
        } else {                                                                                  \
            WGMMA_BF16(kN, kSums, "setp.ne.u32", "=f",                                            \
                       "{" n0 ", " n1 ", " n2 ", " n3 "}, " n4, WGMMA_BF16_A_REGISTERS, n5);      \
        }                                                                                         \
    }

#define WGMMA_WAIT_FOR(kSums, n0)                                                                 \
    template <int kPending>                                                                       \
    __device__ __forceinline__ void wgmma_wait_for(float (&sums)[kSums]) {                        \
        asm volatile("wgmma.wait_group.sync.aligned " n0 ";"                                      \
                     : WGMMA_BF16_OPERANDS_##kSums("+f", sums)                                    \
                     : "n"(kPending)                                                              \
                     : "memory");                                                                 \
    }

WGMMA_BF16_FUNCTIONS(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_BF16_FUNCTIONS(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA_BF16_FUNCTIONS(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_BF16_FUNCTIONS(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

WGMMA_WAIT_FOR(32, "%32")
WGMMA_WAIT_FOR(48, "%48")
WGMMA_WAIT_FOR(64, "%64")
WGMMA_WAIT_FOR(128, "%128")

#undef WGMMA_BF16_FUNCTIONS
#undef WGMMA_WAIT_FOR
#undef WGMMA_BF16_A_SHARED
#undef WGMMA_BF16_A_REGISTERS
#undef WGMMA_BF16_REGISTERS_32
#undef WGMMA_BF16_OPERANDS_32
#undef WGMMA_BF16_REGISTERS_48
#undef WGMMA_BF16_OPERANDS_48
#undef WGMMA_BF16_REGISTERS_64
#undef WGMMA_BF16_OPERANDS_64
#undef WGMMA_BF16_REGISTERS_128
#undef WGMMA_BF16_OPERANDS_128
#undef WGMMA_BF16
