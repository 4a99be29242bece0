// Splits a matrix into two side by side, and joins the two, BF16:
//
//   split_columns  x [rows, a + b] to first [rows, a] and rest [rows, b]
//   join_columns   the inverse
//
// Copies, with unchanged bits. Roofline: 4 rows (a + b) bytes at memcpy bandwidth. A row belongs to
// up to 32 lanes that move 16 bytes at a time; `_scalar` kernels move single elements, for parts
// that are not a multiple of eight columns.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16_unit.cuh"
#include "common/types.cuh"
#include "layout/row_lanes.cuh"

constexpr uint32 kThreads = 256;

// Calls `move(unit of the whole, unit of the part, whether the part is the first)` for each unit.
template <typename Move>
__device__ __forceinline__ void for_units(uint32 rows, uint32 first_units, uint32 rest_units,
                                          uint32 lanes, const Move& move) {
    const uint32 units = first_units + rest_units;
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < rows; first += at.step) {
        const uint32 row = at.row(first);
        if (row >= rows) {
            return;
        }
#pragma unroll 4
        for (uint32 unit = at.lane; unit < units; unit += lanes) {
            const uint64 whole = uint64{row} * units + unit;
            if (unit < first_units) {
                move(whole, uint64{row} * first_units + unit, true);
            } else {
                move(whole, uint64{row} * rest_units + (unit - first_units), false);
            }
        }
    }
}

template <bool kVector>
__device__ __forceinline__ void split(const bf16* __restrict__ x, bf16* __restrict__ first,
                                      bf16* __restrict__ rest, uint32 rows, uint32 first_columns,
                                      uint32 rest_columns, uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    for_units(rows, first_columns / Unit::kElements, rest_columns / Unit::kElements, lanes,
              [&](uint64 whole, uint64 part, bool is_first) {
                  reinterpret_cast<Bits*>(is_first ? first : rest)[part] =
                      reinterpret_cast<const Bits*>(x)[whole];
              });
}

template <bool kVector>
__device__ __forceinline__ void join(const bf16* __restrict__ first,
                                     const bf16* __restrict__ rest, bf16* __restrict__ x,
                                     uint32 rows, uint32 first_columns, uint32 rest_columns,
                                     uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    for_units(rows, first_columns / Unit::kElements, rest_columns / Unit::kElements, lanes,
              [&](uint64 whole, uint64 part, bool is_first) {
                  reinterpret_cast<Bits*>(x)[whole] =
                      reinterpret_cast<const Bits*>(is_first ? first : rest)[part];
              });
}

// x [rows, first_columns + rest_columns], first [rows, first_columns], rest [rows, rest_columns];
// 16-byte aligned.
#define SPLIT_COLUMNS_KERNEL(name, vector)                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ x, bf16* __restrict__ first, bf16* __restrict__ rest,      \
             uint32 rows, uint32 first_columns, uint32 rest_columns, uint32 lanes) {             \
        split<vector>(x, first, rest, rows, first_columns, rest_columns, lanes);                 \
    }

#define JOIN_COLUMNS_KERNEL(name, vector)                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ first, const bf16* __restrict__ rest,                      \
             bf16* __restrict__ x, uint32 rows, uint32 first_columns, uint32 rest_columns,       \
             uint32 lanes) {                                                                     \
        join<vector>(first, rest, x, rows, first_columns, rest_columns, lanes);                  \
    }

SPLIT_COLUMNS_KERNEL(split_columns, true)
SPLIT_COLUMNS_KERNEL(split_columns_scalar, false)
JOIN_COLUMNS_KERNEL(join_columns, true)
JOIN_COLUMNS_KERNEL(join_columns_scalar, false)
