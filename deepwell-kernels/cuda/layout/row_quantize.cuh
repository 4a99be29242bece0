// Rows that a kernel makes as it reads them, and their block quantization: nothing of the rows
// themselves is written but where somebody else reads them.
//
// A CTA has a tile of 128 x 128 elements, so that SMs take tiles as they come free: on an H200 a
// grid that is as large as the device and goes from tile to tile is slower.
//
// What the rows are is told by `Rows`. A vector is eight neighbouring elements of a row:
//
//   Loaded                           what is read for a vector
//   load(in_tile, place) const       reads it, for row `in_tile` of the tile that exists
//   result(loaded, in_tile) const    the vector
#pragma once

#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/mx_plain_tile.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"

using ElementTile = MxTile<bf16>;
// Rows whose loads a thread starts together, that it need not wait for memory eight times.
constexpr int kTogether = 4;
static_assert(kMxPlainRows % kTogether == 0, "whole batches");

// An element of a matrix.
struct ElementPlace {
    uint32 row;
    uint32 column;

    __device__ __forceinline__ uint64 of(uint32 columns) const {
        return static_cast<uint64>(row) * columns + column;
    }
};

// The tile of a CTA in matrices [rows, columns], columns a multiple of 8, and where the vectors of
// a thread lie in it.
struct ElementPlaces {
    uint32 row0;
    uint32 column0;
    uint32 rows;
    uint32 columns;

    // Tile `index` of the matrices of `to`, those of a row of tiles one after the other.
    __device__ __forceinline__ ElementPlaces(uint32 index, const MxTarget& to)
        : rows(to.rows), columns(to.columns) {
        const uint32 across = max(tiles_across(to), 1u);
        row0 = index / across * kMxTile;
        column0 = index % across * kMxTile;
    }

    // The same, those of a band of `band` columns of tiles first: all rows of a band, then the
    // next band.
    __device__ __forceinline__ ElementPlaces(uint32 index, const MxTarget& to, uint32 band)
        : rows(to.rows), columns(to.columns) {
        const uint32 down = max(tiles_down(to), 1u);
        const uint32 first = index / (band * down) * band;
        const uint32 in_band = index - first * down;
        // The last band may have fewer columns of tiles.
        const uint32 wide = max(min(band, tiles_across(to) - first), 1u);
        row0 = in_band / wide * kMxTile;
        column0 = (first + in_band % wide) * kMxTile;
    }

    static __device__ __forceinline__ uint32 tiles_across(const MxTarget& to) {
        return (to.columns + kMxTile - 1) / kMxTile;
    }
    static __device__ __forceinline__ uint32 tiles_down(const MxTarget& to) {
        return (to.rows + kMxTile - 1) / kMxTile;
    }
    // No memory holds 2^32 of them.
    static __device__ __forceinline__ uint32 tiles(const MxTarget& to) {
        return tiles_down(to) * tiles_across(to);
    }

    // Step `step` of any tile.
    __device__ __forceinline__ bool exists(int step) const {
        const ElementPlace at = place(step);
        return at.row < rows && at.column < columns;
    }
    static __device__ __forceinline__ uint32 in_tile(int step) {
        return ElementTile::row() + step * kMxStepRows;
    }
    __device__ __forceinline__ ElementPlace place(int step) const {
        return {row0 + in_tile(step), column0 + ElementTile::column()};
    }

    // Row `row` of a thread in a tile of `layout/mx_plain_tile.cuh`.
    __device__ __forceinline__ ElementPlace plain_place(int row) const {
        return {row0 + mx_plain_row() + row, column0 + mx_plain_column()};
    }
};

// The elements of a vector at a place.
__device__ __forceinline__ uint4 load_vector(const bf16* matrix, const ElementPlace& place,
                                             uint32 columns) {
    return *reinterpret_cast<const uint4*>(matrix + place.of(columns));
}
__device__ __forceinline__ void store_vector(bf16* matrix, const ElementPlace& place,
                                             uint32 columns, const uint4& vector) {
    *reinterpret_cast<uint4*>(matrix + place.of(columns)) = vector;
}

// A tile of `layout/mx_plain_tile.cuh`.
template <bool kWide, bool kRow, bool kColumn, typename Rows>
__device__ __forceinline__ void row_quantize_plain(const Rows& rows, const ElementPlaces& places,
                                                   bf16* result, const MxTarget& to, uint4* stage,
                                                   MxPlainShared& shared, MxTally& tally) {
    uint4 results[kMxPlainRows];
#pragma unroll
    for (int row = 0; row < kMxPlainRows; row += kTogether) {
        typename Rows::Loaded loaded[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            loaded[i] = rows.load(mx_plain_row() + row + i, places.plain_place(row + i));
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            results[row + i] = rows.result(loaded[i], mx_plain_row() + row + i);
            if (result != nullptr) {
                store_vector(result, places.plain_place(row + i), to.columns, results[row + i]);
            }
        }
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(results, places.row0, places.column0, to, stage,
                                             shared, tally);
}

// Any tile.
template <bool kRow, bool kColumn, typename Rows>
__device__ __forceinline__ void row_quantize_tile(const Rows& rows, const ElementPlaces& places,
                                                  bf16* result, const MxTarget& to, uint32 flags,
                                                  uint32* tile, MxTally& tally) {
    __shared__ MxShared shared;
    MxCounters counters;
    if (blockIdx.x < ElementPlaces::tiles(to)) {
#pragma unroll 2
        for (int step = 0; step < kMxSteps; ++step) {
            const uint32 in_tile = ElementPlaces::in_tile(step);
            uint4 vector = make_uint4(0, 0, 0, 0);
            if (places.exists(step)) {
                vector = rows.result(rows.load(in_tile, places.place(step)), in_tile);
                if (result != nullptr) {
                    store_vector(result, places.place(step), to.columns, vector);
                }
            }
            mx_vector<bf16>(tile, step) = vector;
        }
        mx_quantize_tile<bf16, kRow, kColumn>(places.row0, places.column0, to, flags, tile, shared,
                                              counters);
    }
    tally.leave(counters);
    __syncthreads();
    tally.give();
}

// Quantizes rows; `result` may be null. Flags, totals and statistics [6] as in `quantize.cu`; a CTA
// for each tile, or one where there is none.
template <bool kRow, bool kColumn, typename Rows>
__device__ __forceinline__ void row_quantize(const Rows& rows, const ElementPlaces& places,
                                             bf16* result, const MxTarget& to, uint32 flags,
                                             MxTotals* totals, uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxPlainShared shared;
    __shared__ MxTallyShared of_tally;
    MxTally tally(of_tally, totals);
    if (!mx_is_plain(to, flags)) {
        row_quantize_tile<kRow, kColumn>(rows, places, result, to, flags,
                                         reinterpret_cast<uint32*>(dynamic), tally);
    } else if (flags & kMxWide) {
        row_quantize_plain<true, kRow, kColumn>(rows, places, result, to, dynamic, shared, tally);
    } else {
        row_quantize_plain<false, kRow, kColumn>(rows, places, result, to, dynamic, shared, tally);
    }
    const uint64 operands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    tally.finish(gridDim.x, operands * to.rows * to.columns, statistics);
}
