// Loads and stores of tensor memory in 16 lanes: the layout of accumulators of `mma.sync`, for
// warps that combine values with others that depend on the column. Thread t has, of each eight
// columns, columns 2 (t % 4) and the next of lane t / 4, and then the same of lane t / 4 + 8.
#pragma once

#include "common/types.cuh"

// Loads 64 columns: values[4 i + 2 j + k] is column 8 i + 2 (t % 4) + k of lane t / 4 + 8 j. Valid
// after tcgen05_wait_load.
__device__ __forceinline__ void tcgen05_load_64_columns_of_16_lanes(uint32 (&values)[32],
                                                                    uint32 address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.16x256b.x8.b32 "
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

// Stores 16 columns, each of two 16-bit values: pairs[2 i + j] is column 4 i + t % 4 of lane t / 4
// + 8 j, where the pair of columns of a load goes that begins at twice the column. Complete after
// tcgen05_wait_store.
__device__ __forceinline__ void tcgen05_store_16_columns_of_16_lanes(uint32 address,
                                                                     const uint32 (&pairs)[8]) {
    asm volatile(
        "tcgen05.st.sync.aligned.16x128b.x4.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
        :
        : "r"(address), "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3]),
          "r"(pairs[4]), "r"(pairs[5]), "r"(pairs[6]), "r"(pairs[7])
        : "memory");
}
