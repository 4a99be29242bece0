// Gradients of a gated activation with respect to gate and up, and the block quantization of both.
// The inputs are read once.
//
// A CTA keeps one tile of each gradient in shared memory and quantizes the two in sequence. If
// tiles are plain, a CTA may process several, as in `layout/row_quantize.cuh`. `Gradients` computes
// the gradients, in vectors of eight neighbouring elements of a row:
//
//   load(in_tile, place) const       the `PairSources` of row `in_tile` of the tile
//   result(tile, sources, in_tile) const
//                                    the `GradientVectors` of a row; called by all threads
//                                    of a warp, sixteen neighbouring threads per row
//
// `begin`, `ask`, `take` and `advance` are as in `Rows` of `layout/row_quantize.cuh`.
#pragma once

#include "common/types.cuh"
#include "layout/row_quantize.cuh"

// Steps whose loads, three each, a thread issues together.
constexpr int kPairsTogether = 4;

// A gradient and its outputs.
struct Gradient {
    bf16* values;  // null if no op reads them
    MxTarget to;
    uint32 flags;
    MxTotals* totals;
    uint64* statistics;
};

// Inputs of a vector of both gradients.
struct PairSources {
    uint4 dout = make_uint4(0, 0, 0, 0);
    uint4 gate = make_uint4(0, 0, 0, 0);
    uint4 up = make_uint4(0, 0, 0, 0);
};

struct GradientVectors {
    uint4 gate = make_uint4(0, 0, 0, 0);
    uint4 up = make_uint4(0, 0, 0, 0);
};

__device__ __forceinline__ void store_gradients(const Gradient& dgate, const Gradient& dup,
                                                const ElementPlace& place,
                                                const GradientVectors& vectors) {
    if (dgate.values != nullptr) {
        store_vector(dgate.values, place, dgate.to.columns, vectors.gate);
    }
    if (dup.values != nullptr) {
        store_vector(dup.values, place, dup.to.columns, vectors.up);
    }
}

// A tile of `layout/mx_plain_tile.cuh`. A thread saves both gradients in private slots of shared
// memory and reads the two back in sequence. Once all threads have read the first gradient, its
// memory becomes the stage.
template <bool kWide, bool kRow, bool kColumn, typename Gradients, typename GateTally,
          typename UpTally>
__device__ __forceinline__ void gradient_pair_plain(const Gradients& gradients,
                                                    const ElementPlaces& places,
                                                    const Gradient& dgate, const Gradient& dup,
                                                    uint4* dynamic, MxPlainShared& shared,
                                                    GateTally& gate_tally, UpTally& up_tally) {
    uint4* const stage = dynamic;
    uint4* const own_gate = dynamic + threadIdx.x;
    uint4* const own_up = own_gate + ElementTile::kTileBytes / 16;
#pragma unroll 1
    for (int row = 0; row < kMxPlainRows; row += kPairsTogether) {
        PairSources sources[kPairsTogether];
#pragma unroll
        for (int i = 0; i < kPairsTogether; ++i) {
            sources[i] = gradients.load(mx_plain_row() + row + i, places.plain_place(row + i));
        }
#pragma unroll
        for (int i = 0; i < kPairsTogether; ++i) {
            const GradientVectors of =
                gradients.result(places, sources[i], mx_plain_row() + row + i);
            store_gradients(dgate, dup, places.plain_place(row + i), of);
            own_gate[(row + i) * kMxPlainThreads] = of.gate;
            own_up[(row + i) * kMxPlainThreads] = of.up;
        }
    }
    uint4 vectors[kMxPlainRows];
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
        vectors[row] = own_gate[row * kMxPlainThreads];
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(vectors, places.row0, places.column0, dgate.to,
                                             stage, shared, gate_tally);
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
        vectors[row] = own_up[row * kMxPlainThreads];
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(vectors, places.row0, places.column0, dup.to, stage,
                                             shared, up_tally);
}

// Tiles of a CTA, all of `layout/mx_plain_tile.cuh`.
template <bool kWide, bool kRow, bool kColumn, typename Gradients>
__device__ __forceinline__ void gradient_pair_tiles(Gradients& gradients, const Gradient& dgate,
                                                    const Gradient& dup, uint4* dynamic,
                                                    MxPlainShared& shared, MxTally& gate_tally,
                                                    MxTally& up_tally) {
    if constexpr (Gradients::kWalks) {
        __shared__ uint2 of_tiles[TileRing::kPlaces];
        PlainRows nothing;
        TileRing tiles(of_tiles, dgate.to, 0);
        gradients.begin(tiles.now(), tiles.next());
        for (; tiles.now().any(); tiles.advance()) {
            tiles.look_ahead();
            gradients.ask(tiles.next(), tiles.after());
            if (kColumn && !tiles.is_first()) {
                // All threads have read the stage of the previous tile.
                __syncthreads();
            }
            MxTilesTally<Gradients> of_gate = {gate_tally, gradients, tiles};
            MxTilesTally<PlainRows> of_up = {up_tally, nothing, tiles};
            gradient_pair_plain<kWide, kRow, kColumn>(gradients, tiles.now(), dgate, dup, dynamic,
                                                      shared, of_gate, of_up);
            gradients.advance();
        }
        gate_tally.give();
        up_tally.give();
    } else {
        const ElementPlaces places(blockIdx.x, dgate.to);
        gradients.begin(places, places);
        gradient_pair_plain<kWide, kRow, kColumn>(gradients, places, dgate, dup, dynamic, shared,
                                                  gate_tally, up_tally);
    }
}

// Any tile.
template <bool kRow, bool kColumn, typename Gradients>
__device__ __forceinline__ void gradient_pair_tile(Gradients& gradients,
                                                   const Gradient& dgate, const Gradient& dup,
                                                   uint4* dynamic, MxTally& gate_tally,
                                                   MxTally& up_tally) {
    uint32* const gate_tile = reinterpret_cast<uint32*>(dynamic);
    uint32* const up_tile = gate_tile + ElementTile::kTileBytes / 4;
    __shared__ MxShared shared;
    MxCounters gate_counters, up_counters;
    const ElementPlaces places(blockIdx.x, dgate.to);
    if (places.any()) {
        gradients.begin(places, places);
#pragma unroll 1
        for (int step = 0; step < kMxSteps; ++step) {
            const uint32 in_tile = ElementPlaces::in_tile(step);
            const bool exists = places.exists(step);
            PairSources sources;
            if (exists) {
                sources = gradients.load(in_tile, places.place(step));
            }
            GradientVectors of = gradients.result(places, sources, in_tile);
            if (exists) {
                store_gradients(dgate, dup, places.place(step), of);
            } else {
                of = GradientVectors();
            }
            mx_vector<bf16>(gate_tile, step) = of.gate;
            mx_vector<bf16>(up_tile, step) = of.up;
        }
        mx_quantize_tile<bf16, kRow, kColumn>(places.row0, places.column0, dgate.to, dgate.flags,
                                              gate_tile, shared, gate_counters);
        // All threads have read the shared data of the first gradient.
        __syncthreads();
        mx_quantize_tile<bf16, kRow, kColumn>(places.row0, places.column0, dup.to, dup.flags,
                                              up_tile, shared, up_counters);
    }
    gate_tally.leave(gate_counters);
    up_tally.leave(up_counters);
    __syncthreads();
    gate_tally.give();
    up_tally.give();
}

// Quantizes both gradients, [rows, columns] with columns a multiple of 8. The grid has a CTA per
// tile, at least one; fewer CTAs may be launched if tiles are plain.
template <bool kRow, bool kColumn, typename Gradients>
__device__ __forceinline__ void gradient_pair_quantize(Gradients gradients,
                                                       const Gradient& dgate,
                                                       const Gradient& dup) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxPlainShared shared;
    __shared__ MxTallyShared of_tallies[2];
    MxTally gate_tally(of_tallies[0], dgate.totals), up_tally(of_tallies[1], dup.totals);
    const MxTarget& to = dgate.to;
    const bool wide = dgate.flags & kMxWide;
    if (!mx_is_plain(to, dgate.flags | dup.flags) || wide != ((dup.flags & kMxWide) != 0)) {
        gradient_pair_tile<kRow, kColumn>(gradients, dgate, dup, dynamic, gate_tally, up_tally);
    } else if (wide) {
        gradient_pair_tiles<true, kRow, kColumn>(gradients, dgate, dup, dynamic, shared, gate_tally,
                                                 up_tally);
    } else {
        gradient_pair_tiles<false, kRow, kColumn>(gradients, dgate, dup, dynamic, shared,
                                                  gate_tally, up_tally);
    }
    const uint64 elements =
        static_cast<uint64>((kRow ? 1 : 0) + (kColumn ? 1 : 0)) * to.rows * to.columns;
    gate_tally.finish(gridDim.x, elements, dgate.statistics);
    up_tally.finish(gridDim.x, elements, dup.statistics);
}
