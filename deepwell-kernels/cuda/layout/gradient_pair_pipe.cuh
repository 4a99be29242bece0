// Gradients of a gated activation and the block quantization of both, as in
// `layout/gradient_pair_quantize.cuh`, pipelined over tiles of `layout/mx_plain_tile.cuh` so that
// loads are always in flight.
//
// An SM needs some 25 KB of loads in flight to saturate the memory of an H200. A CTA that loads a
// tile and then quantizes it has no loads in flight during the quantization, which is most of its
// lifetime. Here a persistent CTA goes from tile to tile. It prefetches gate and up of the next
// tile as soon as their stage in shared memory is free, before the quantization, and dout as soon
// as registers are free, before quantized data is written.
//
// A CTA has 2 x 256 threads; an SM holds two CTAs. All threads compute gradients in place of their
// inputs in shared memory, four rows per thread. Then the threads of each `threadIdx.y` quantize
// one gradient, eight rows per thread.
//
// `Gradients` has the members of `layout/gradient_pair_quantize.cuh`, and these, called by all
// threads:
//
//   dout, gate, up, columns          the matrices
//   start(next, after)               as `ask`; its copies are committed with those of the next tile
//   next_has(in_tile)                whether row `in_tile` of the next tile is read; valid after
//                                    `start` and a barrier
//                                    a barrier
#pragma once

#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "ptx/cp_async.cuh"

constexpr uint32 kPipeThreads = 2 * kMxPlainThreads;
constexpr int kPipeRows = kMxPlainRows / 2;  // rows of gradients that a thread computes

// Dynamic shared memory.
struct PairPipe {
    // Indexed by gradient, row of a thread and thread of a tile.
    uint4 vectors[2][kMxPlainRows][kMxPlainThreads];
    uint4 stages[2][kMxTile * kMxTile / 16];
};

// The tiles of a CTA, with a stride of the grid size.
struct TileWalk {
    uint32 down;    // stride in rows, from whole rows of tiles
    uint32 across;  // rest of the stride, in columns
    uint32 width;   // columns of a row of whole tiles

    __device__ __forceinline__ explicit TileWalk(const MxTarget& to) {
        const uint32 tiles = max(ElementPlaces::tiles_across(to), 1u);
        down = gridDim.x / tiles * kMxTile;
        across = gridDim.x % tiles * kMxTile;
        width = tiles * kMxTile;
    }
    __device__ __forceinline__ ElementPlaces next(ElementPlaces tile) const {
        tile.row0 += down;
        tile.column0 += across;
        if (tile.column0 >= width) {
            tile.column0 -= width;
            tile.row0 += kMxTile;
        }
        return tile;
    }
};

// Starts to load the input of gradient `threadIdx.y` (gate or up) for a tile.
template <typename Gradients>
__device__ __forceinline__ void pair_pipe_ask(const Gradients& gradients,
                                              const ElementPlaces& tile, PairPipe& pipe) {
    if (tile.any()) {
        const bf16* const source = threadIdx.y == 0 ? gradients.gate : gradients.up;
        const bf16* const from = source + tile.plain_place(0).of(gradients.columns);
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            cp_async_16(static_cast<uint32>(__cvta_generic_to_shared(
                            &pipe.vectors[threadIdx.y][row][threadIdx.x])),
                        from + static_cast<uint64>(row) * gradients.columns,
                        gradients.next_has(mx_plain_row() + row) ? 16 : 0);
        }
    }
    cp_async_commit();
}

// Inputs of a vector of both gradients, of which gate and up are in shared memory.
template <typename Gradients>
__device__ __forceinline__ PairSources pair_pipe_sources(const Gradients&, const uint4& dout,
                                                         const uint4& gate, const uint4& up) {
    return {dout, gate, up};
}

// Loads the rows of dout whose gradients the thread computes.
template <typename Gradients>
__device__ __forceinline__ void pair_pipe_load(const Gradients& gradients,
                                               const ElementPlaces& tile,
                                               uint4 (&dout)[kPipeRows]) {
#pragma unroll
    for (int i = 0; i < kPipeRows; ++i) {
        const int row = threadIdx.y * kPipeRows + i;
        dout[i] = make_uint4(0, 0, 0, 0);
        if (tile.any() && gradients.next_has(mx_plain_row() + row)) {
            dout[i] = load_vector(gradients.dout, tile.plain_place(row), gradients.columns);
        }
    }
}

// Leaves a CTA's counts after each tile; the registers of the tile are free at this point.
template <typename Gradients>
struct PairPipeTally {
    const MxTally& tally;
    const Gradients& gradients;
    const ElementPlaces& next;
    uint4 (&dout)[kPipeRows];
    bool adds;

    __device__ __forceinline__ void leave(const MxCounters& counters) const {
        pair_pipe_load(gradients, next, dout);
        tally.leave(counters, adds);
    }
    __device__ __forceinline__ void give() const {}
};

template <bool kWide, bool kRow, bool kColumn, typename Gradients>
__device__ __forceinline__ void gradient_pair_pipe_tiles(Gradients& gradients,
                                                         const Gradient& dgate,
                                                         const Gradient& dup, PairPipe& pipe,
                                                         MxPlainShared& shared, MxTally& tally) {
    const MxTarget to = threadIdx.y == 0 ? dgate.to : dup.to;
    const TileWalk walk(dgate.to);
    ElementPlaces now(blockIdx.x, dgate.to), next = walk.next(now);
    gradients.begin(now, next);
    uint4 dout[kPipeRows];
    gradients.advance();
    pair_pipe_ask(gradients, now, pipe);
    pair_pipe_load(gradients, now, dout);
    gradients.advance();
    for (bool adds = false; now.any(); adds = true) {
        cp_async_wait<0>();
        // All prefetched data has arrived, and the previous tile has been written.
        __syncthreads();
        gradients.start(next, walk.next(next));
#pragma unroll
        for (int i = 0; i < kPipeRows; ++i) {
            const int row = threadIdx.y * kPipeRows + i;
            uint4& gate = pipe.vectors[0][row][threadIdx.x];
            uint4& up = pipe.vectors[1][row][threadIdx.x];
            const PairSources sources = pair_pipe_sources(gradients, dout[i], gate, up);
            const GradientVectors of = gradients.result(now, sources, mx_plain_row() + row);
            store_gradients(dgate, dup, now.plain_place(row), of);
            gate = of.gate;
            up = of.up;
        }
        __syncthreads();
        uint4 vectors[kMxPlainRows];
#pragma unroll
        for (int row = 0; row < kMxPlainRows; ++row) {
            vectors[row] = pipe.vectors[threadIdx.y][row][threadIdx.x];
        }
        pair_pipe_ask(gradients, next, pipe);
        PairPipeTally<Gradients> left = {tally, gradients, next, dout, adds};
        mx_quantize_vectors<kWide, kRow, kColumn, MxPartOfCta>(
            vectors, now.row0, now.column0, to, pipe.stages[threadIdx.y], shared, left);
        gradients.advance();
        now = next;
        next = walk.next(next);
    }
    tally.give();
}

// Quantizes both gradients, [rows, columns] of whole tiles, in the same way; `mx_is_plain` holds.
// CTAs of 256 x 2 threads, at most as many as are resident at once.
template <bool kRow, bool kColumn, typename Gradients>
__device__ __forceinline__ void gradient_pair_pipe(Gradients gradients, const Gradient& dgate,
                                                   const Gradient& dup) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxPlainShared shared[2];
    __shared__ MxTallyShared of_tallies[2];
    PairPipe& pipe = *reinterpret_cast<PairPipe*>(dynamic);
    MxTally tally(of_tallies[threadIdx.y], threadIdx.y == 0 ? dgate.totals : dup.totals);
    if (dgate.flags & kMxWide) {
        gradient_pair_pipe_tiles<true, kRow, kColumn>(gradients, dgate, dup, pipe,
                                                      shared[threadIdx.y], tally);
    } else {
        gradient_pair_pipe_tiles<false, kRow, kColumn>(gradients, dgate, dup, pipe,
                                                       shared[threadIdx.y], tally);
    }
    const uint64 elements = static_cast<uint64>((kRow ? 1 : 0) + (kColumn ? 1 : 0)) *
                            dgate.to.rows * dgate.to.columns;
    tally.finish(gridDim.x, elements, threadIdx.y == 0 ? dgate.statistics : dup.statistics);
}
