// Rows of one attention head in shared memory, [rows, kHeadDim] BF16.
//
// A row is kHeadDim / 8 units of 16 bytes. Unit u of row r is stored at position u ^ rotation(r) of
// its row. The same unit of eight neighbouring rows (read at a time by ldmatrix, and written by a
// quarter of a warp) thus lies in eight different groups of four banks. The rotation repeats every
// eight rows or sooner, so adding a multiple of 8 rows does not change it.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"

template <int kHeadDim>
struct HeadTile {
    static_assert(kHeadDim == 16 || kHeadDim == 32 || kHeadDim == 64 || kHeadDim == 128 ||
                      kHeadDim == 192,
                  "a row is 2 to 16 units, a power of two, or 24, three times the rotated ones");

    static constexpr int kUnits = kHeadDim / 8;
    static constexpr int kRowBytes = kHeadDim * 2;
    // Elements of a value in a row: keys of 192 elements have values of at most 128.
    static constexpr int kValueElements = kHeadDim > 128 ? 128 : kHeadDim;
    // Rows that fit into the 128 bytes spanned by the banks.
    static constexpr int kRowsPerLine = kUnits < 8 ? 8 / kUnits : 1;

    // Bytes from the start of the tile (aligned to kRowBytes at least) to a unit.
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 unit) {
        const uint32 rotation = (row / kRowsPerLine) % (kUnits < 8 ? kUnits : 8);
        return row * kRowBytes + ((unit ^ rotation) << 4);
    }
};

// Elements of a head in global memory: a whole row of a tile, or, in kernels for narrower heads,
// `head_dim`, a multiple of 8. The rest of a row is then zeros, which add nothing to a dot product.
template <int kHeadDim, bool kPadded>
__device__ __forceinline__ uint32 head_width(uint32 head_dim) {
    return kPadded ? head_dim : kHeadDim;
}

// Starts the copy of `kRows` rows to `tile`. Rows from `rows_left` (at least 1) on and elements
// from `width` on, a `head_width`, become zeros. `first_row` points to the head's part of the first
// row. `row_stride` is the number of elements from row to row, at most 2^22, so that offsets within
// a tile fit in 32 bits. If the row length is not a power of two, `kUnroll` passes are unrolled; 1
// takes the fewest registers.
template <int kHeadDim, int kRows, int kThreads, int kUnroll = 16>
__device__ __forceinline__ void copy_head_tile(uint32 tile, const bf16* first_row,
                                               uint32 row_stride, int rows_left, uint32 width) {
    using Tile = HeadTile<kHeadDim>;
    if constexpr (kThreads % Tile::kUnits != 0) {
        static_assert(kRows * Tile::kUnits % kThreads == 0, "each thread has as many units");
#pragma unroll kUnroll
        for (int pass = 0; pass < kRows * Tile::kUnits / kThreads; ++pass) {
            const uint32 index = threadIdx.x + pass * kThreads;
            const uint32 row = index / Tile::kUnits;
            const uint32 unit = index - row * Tile::kUnits;
            const bool inside = static_cast<int>(row) < rows_left && unit * 8 < width;
            cp_async_16(tile + Tile::offset(row, unit),
                        inside ? first_row + (row * row_stride + unit * 8) : first_row,
                        inside ? 16 : 0);
        }
    } else {
        constexpr int kRowsPerPass = kThreads / Tile::kUnits;
        static_assert(kRowsPerPass % 8 == 0, "the rotation is the same in every pass");
        static_assert(kRows % 8 == 0, "a pass that is not whole ends at a warp");

        const uint32 row = threadIdx.x / Tile::kUnits;
        const uint32 unit = threadIdx.x % Tile::kUnits;
        const uint32 target = tile + Tile::offset(row, unit);
        const bf16* source = first_row + (row * row_stride + unit * 8);
#pragma unroll
        for (int pass = 0; pass < (kRows + kRowsPerPass - 1) / kRowsPerPass; ++pass) {
            const int at = static_cast<int>(row) + pass * kRowsPerPass;
            if (kRows % kRowsPerPass == 0 || at < kRows) {
                const bool inside = at < rows_left && unit * 8 < width;
                // A copy of zero bytes reads nothing; its address is kept inside the matrix anyway.
                cp_async_16(target + pass * kRowsPerPass * Tile::kRowBytes,
                            inside ? source : first_row, inside ? 16 : 0);
            }
            source += kRowsPerPass * row_stride;
        }
    }
}
