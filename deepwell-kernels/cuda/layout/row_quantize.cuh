// Rows that a kernel computes from its inputs, fused with block quantization. The rows themselves
// are written only if another op reads them.
//
// A CTA processes a tile of 128 x 128 elements, so that free SMs take the next tile. If rows are
// gathered by index and tiles are those of `layout/mx_plain_tile.cuh`, a CTA processes several
// tiles with a stride of the grid size. It prefetches the row indices of its next tile while it
// quantizes the current tile. Otherwise each tile would wait in turn for the indices, for the rows,
// and for the counters of `layout/mx_statistics.cuh`, which together take longer than its
// instructions. Rows are not prefetched: bulk prefetches of 256 bytes, and of lines, made all of
// these kernels slower.
//
// `Rows` computes the rows. A vector is eight neighbouring elements of a row:
//
//   Loaded                           inputs of a vector
//   kWalks                           whether CTAs process more than one tile
//   kTogether                        rows whose loads a thread issues together
//   load(in_tile, place) const       loads the inputs of row `in_tile` of the tile; the row exists
//   result(loaded, in_tile) const    the vector
//
// Prefetch functions, called by all threads. Tiles are passed as `ElementPlaces`; `any` tells
// whether a tile exists:
//
//   begin(first, second)    loads the row data of the first tile; ends with a barrier
//   ask(next, after)        starts to load the row data of the next tile
//   take()                  waits for this data; a barrier follows
//   advance()               `load` and `result` refer to the next tile from now on
#pragma once

#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/mx_plain_tile.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"

using ElementTile = MxTile<bf16>;

// An element of a matrix.
struct ElementPlace {
    uint32 row;
    uint32 column;

    __device__ __forceinline__ uint64 of(uint32 columns) const {
        return static_cast<uint64>(row) * columns + column;
    }
};

// The tile of a CTA in matrices [rows, columns], columns a multiple of 8, and the positions of a
// thread's vectors in the tile.
struct ElementPlaces {
    uint32 row0;
    uint32 column0;
    uint32 rows;
    uint32 columns;

    // Tile `index` of the matrices of `to`, in row-major order of tiles.
    __device__ __forceinline__ ElementPlaces(uint32 index, const MxTarget& to)
        : rows(to.rows), columns(to.columns) {
        const uint32 across = max(tiles_across(to), 1u);
        row0 = index / across * kMxTile;
        column0 = index % across * kMxTile;
    }

    // Tile `index` in an order of bands of `band` columns of tiles: all rows of a band, then the
    // next band. Beyond the last tile the position is outside the matrix.
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

    __device__ __forceinline__ ElementPlaces(const uint2& first, const MxTarget& to)
        : row0(first.x), column0(first.y), rows(to.rows), columns(to.columns) {}

    static __device__ __forceinline__ uint32 tiles_across(const MxTarget& to) {
        return (to.columns + kMxTile - 1) / kMxTile;
    }
    static __device__ __forceinline__ uint32 tiles_down(const MxTarget& to) {
        return (to.rows + kMxTile - 1) / kMxTile;
    }
    // Fits in 32 bits: memory cannot hold 2^32 tiles.
    static __device__ __forceinline__ uint32 tiles(const MxTarget& to) {
        return tiles_down(to) * tiles_across(to);
    }

    // Whether any element of the tile is in the matrix.
    __device__ __forceinline__ bool any() const {
        return row0 < rows && column0 < columns;
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

// Columns of tiles in a band; all of them if `band` is zero.
__device__ __forceinline__ uint32 band_of(const MxTarget& to, uint32 band) {
    return band > 0 ? band : max(ElementPlaces::tiles_across(to), 1u);
}

// Positions of a CTA's tiles: tile n of the CTA, in slot n % 4, is tile blockIdx.x + n * gridDim.x.
// One thread computes each position, three tiles ahead, and all threads read it from shared memory.
// Keeping four positions takes registers, and computing one takes some forty instructions.
class TileRing {
  public:
    static constexpr uint32 kPlaces = 4;

  private:
    uint2 (&places_)[kPlaces];
    const MxTarget& to_;
    uint32 band_;
    uint32 now_ = 0;

    __device__ __forceinline__ ElementPlaces ahead(uint32 count) const {
        return ElementPlaces(places_[(now_ + count) % kPlaces], to_);
    }
    // Memory cannot hold 2^32 tiles, and a grid has fewer CTAs.
    __device__ __forceinline__ void find(uint32 number) const {
        const ElementPlaces found(blockIdx.x + number * gridDim.x, to_, band_);
        places_[number % kPlaces] = make_uint2(found.row0, found.column0);
    }

  public:
    // `places` is in shared memory; `band` is an argument of `band_of`.
    __device__ __forceinline__ TileRing(uint2 (&places)[kPlaces], const MxTarget& to, uint32 band)
        : places_(places),
          to_(to),
          band_(band_of(to, band)) {
        if (threadIdx.x < kPlaces - 1) {
            find(threadIdx.x);
        }
        __syncthreads();
    }

    __device__ __forceinline__ ElementPlaces now() const {
        return ahead(0);
    }
    __device__ __forceinline__ ElementPlaces next() const {
        return ahead(1);
    }
    __device__ __forceinline__ ElementPlaces after() const {
        return ahead(2);
    }
    // By all threads, once per tile; a barrier follows. A barrier must also have followed the last
    // read of the previous tile.
    __device__ __forceinline__ void look_ahead() const {
        if (threadIdx.x == 0) {
            find(now_ + kPlaces - 1);
        }
    }
    __device__ __forceinline__ void advance() {
        ++now_;
    }
    __device__ __forceinline__ bool is_first() const {
        return now_ == 0;
    }
};

// Loads or stores the elements of a vector at a place.
__device__ __forceinline__ uint4 load_vector(const bf16* matrix, const ElementPlace& place,
                                             uint32 columns) {
    return *reinterpret_cast<const uint4*>(matrix + place.of(columns));
}
__device__ __forceinline__ void store_vector(bf16* matrix, const ElementPlace& place,
                                             uint32 columns, const uint4& vector) {
    *reinterpret_cast<uint4*>(matrix + place.of(columns)) = vector;
}

// Base of `Rows` without prefetched data, for CTAs of one tile.
struct PlainRows {
    static constexpr bool kWalks = false;

    __device__ __forceinline__ void begin(const ElementPlaces&, const ElementPlaces&) {}
    __device__ __forceinline__ void ask(const ElementPlaces&, const ElementPlaces&) {}
    __device__ __forceinline__ void take() {}
    __device__ __forceinline__ void start(const ElementPlaces&, const ElementPlaces&) {}
    __device__ __forceinline__ bool next_has(uint32) const {
        return true;
    }
    __device__ __forceinline__ void advance() {}
};

// Tally of a CTA of several tiles: counts are left after each tile and given after the last.
template <typename Rows>
struct MxTilesTally {
    const MxTally& tally;
    Rows& rows;
    const TileRing& tiles;

    __device__ __forceinline__ void leave(const MxCounters& counters) const {
        rows.take();
        tally.leave(counters, !tiles.is_first());
    }
    __device__ __forceinline__ void give() const {}
};

// Quantizes a tile of `layout/mx_plain_tile.cuh`; counts go to `tally`.
template <bool kWide, bool kRow, bool kColumn, typename Rows, typename Tally>
__device__ __forceinline__ void row_quantize_plain(const Rows& rows, const ElementPlaces& places,
                                                   bf16* result, const MxTarget& to, uint4* stage,
                                                   MxPlainShared& shared, Tally& tally) {
    constexpr int kTogether = Rows::kTogether;
    static_assert(kMxPlainRows % kTogether == 0, "whole batches");
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

// Tiles of a CTA, all of `layout/mx_plain_tile.cuh`.
template <bool kWide, bool kRow, bool kColumn, typename Rows>
__device__ __forceinline__ void row_quantize_tiles(Rows& rows, uint32 band, bf16* result,
                                                   const MxTarget& to, uint4* stage,
                                                   MxPlainShared& shared, MxTally& tally) {
    if constexpr (Rows::kWalks) {
        __shared__ uint2 of_tiles[TileRing::kPlaces];
        TileRing tiles(of_tiles, to, band);
        rows.begin(tiles.now(), tiles.next());
        for (; tiles.now().any(); tiles.advance()) {
            tiles.look_ahead();
            rows.ask(tiles.next(), tiles.after());
            MxTilesTally<Rows> left = {tally, rows, tiles};
            row_quantize_plain<kWide, kRow, kColumn>(rows, tiles.now(), result, to, stage, shared,
                                                     left);
            rows.advance();
        }
        tally.give();
    } else {
        const ElementPlaces places(blockIdx.x, to, band_of(to, band));
        rows.begin(places, places);
        row_quantize_plain<kWide, kRow, kColumn>(rows, places, result, to, stage, shared, tally);
    }
}

// Any tile.
template <bool kRow, bool kColumn, typename Rows>
__device__ __forceinline__ void row_quantize_tile(Rows& rows, uint32 band, bf16* result,
                                                  const MxTarget& to, uint32 flags, uint32* tile,
                                                  MxTally& tally) {
    __shared__ MxShared shared;
    MxCounters counters;
    const ElementPlaces places(blockIdx.x, to, band_of(to, band));
    if (places.any()) {
        rows.begin(places, places);
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

// Quantizes rows; `result` may be null. Flags, totals and statistics [6] as in `quantize.cu`. Tiles
// are ordered in bands of `band` columns of tiles. The grid has a CTA per tile, at least one; fewer
// CTAs may be launched if `mx_is_plain`.
template <bool kRow, bool kColumn, typename Rows>
__device__ __forceinline__ void row_quantize(Rows rows, uint32 band, bf16* result,
                                             const MxTarget& to, uint32 flags, MxTotals* totals,
                                             uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxPlainShared shared;
    __shared__ MxTallyShared of_tally;
    MxTally tally(of_tally, totals);
    if (!mx_is_plain(to, flags)) {
        row_quantize_tile<kRow, kColumn>(rows, band, result, to, flags,
                                         reinterpret_cast<uint32*>(dynamic), tally);
    } else if (flags & kMxWide) {
        row_quantize_tiles<true, kRow, kColumn>(rows, band, result, to, dynamic, shared, tally);
    } else {
        row_quantize_tiles<false, kRow, kColumn>(rows, band, result, to, dynamic, shared, tally);
    }
    const uint64 operands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    tally.finish(gridDim.x, operands * to.rows * to.columns, statistics);
}
