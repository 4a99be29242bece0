// Rows of one attention head in shared memory, [rows, kHeadDim] BF16.
//
// A row is kHeadDim / 8 units of 16 bytes. Unit u of row r lies at place u ^ rotation(r) of its
// row, so that the same unit of eight neighbouring rows, which is what ldmatrix reads at a time
// and what a quarter of a warp writes, lies in eight different groups of four banks. The rotation
// repeats every eight rows or sooner, so it does not change when a multiple of 8 rows is added.
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
    // Elements of a value that a row may hold: keys of 192 elements have values of at most 128.
    static constexpr int kValueElements = kHeadDim > 128 ? 128 : kHeadDim;
    // Rows that fit into the 128 bytes over which the banks repeat.
    static constexpr int kRowsPerLine = kUnits < 8 ? 8 / kUnits : 1;

    // Bytes from the start of the tile (aligned to kRowBytes at least) to a unit.
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 unit) {
        const uint32 rotation = (row / kRowsPerLine) % (kUnits < 8 ? kUnits : 8);
        return row * kRowBytes + ((unit ^ rotation) << 4);
    }
};

// Elements of a head in global memory: those of a row of a tile, or, in kernels for narrower heads,
// `head_dim`, a multiple of 8; the rest of a row is zeros then, which change no product.
template <int kHeadDim, bool kPadded>
__device__ __forceinline__ uint32 head_width(uint32 head_dim) {
    return kPadded ? head_dim : kHeadDim;
}

// Starts the copy of `kRows` rows to `tile`; from row `rows_left` (at least 1) on they are zeros,
// and so are elements from `width` on, a `head_width`. `first_row` is the head's part of the first
// row, `row_stride` the elements from row to row, at most 2^22, so that distances within a tile
// have 32 bits. Of rows that are no power of two long `kUnroll` passes are written out; 1 takes the
// fewest registers.
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
                // A copy of no bytes reads nothing, but its address is kept inside all the same.
                cp_async_16(target + pass * kRowsPerPass * Tile::kRowBytes,
                            inside ? source : first_row, inside ? 16 : 0);
            }
            source += kRowsPerPass * row_stride;
        }
    }
}
