// The gradients of a gated activation and the block quantization of both, as
// `layout/gradient_pair_quantize.cuh` has them, for tiles of `layout/mx_plain_tile.cuh` alone and
// with loads under way at all times.
//
// An SM must have some 25 KB on their way to keep the memory of an H200 busy. A CTA that loads a
// tile, then quantizes it, asks for nothing during the second, which takes most of its life. Here a
// CTA goes from tile to tile and asks for the next one's gate and up as soon as their place in
// shared memory is free, which is before the quantization, and for its dout as soon as registers
// are, which is before codes are written.
//
// A CTA has 2 x 256 threads, of which an SM holds two. All make gradients, in the place of what
// they are made of, four rows for a thread; then those of one `threadIdx.y` quantize one gradient,
// eight rows for a thread, while the others quantize the other.
//
// `Gradients` is as there, and has, by all threads:
//
//   dout, gate, up, columns          the matrices
//   start(next, after)               `ask` by copies that are committed with those of the next tile
//   next_has(in_tile)                whether row `in_tile` of the next tile is read, behind it and
//                                    a barrier
#pragma once

#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "ptx/cp_async.cuh"

constexpr uint32 kPipeThreads = 2 * kMxPlainThreads;
constexpr int kPipeRows = kMxPlainRows / 2;  // of which a thread makes gradients

// Dynamic shared memory.
struct PairPipe {
    // By gradients, rows of a thread and threads of a tile.
    uint4 vectors[2][kMxPlainRows][kMxPlainThreads];
    uint4 stages[2][kMxTile * kMxTile / 16];
};

// The tiles of a CTA, a grid apart.
struct TileWalk {
    uint32 down;    // what a grid is in rows of tiles
    uint32 across;  // and tiles beyond
    uint32 width;   // elements of whole tiles across

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

// Starts to read what gradient `threadIdx.y` is made of in a tile.
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

// The rows of dout of which a thread makes gradients.
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

// What a CTA leaves behind each tile; by then the registers of the tile are free.
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
        // What all threads asked for is there, and the tile before is written.
        __syncthreads();
        gradients.start(next, walk.next(next));
#pragma unroll
        for (int i = 0; i < kPipeRows; ++i) {
            const int row = threadIdx.y * kPipeRows + i;
            uint4& gate = pipe.vectors[0][row][threadIdx.x];
            uint4& up = pipe.vectors[1][row][threadIdx.x];
            const GradientVectors of =
                gradients.result(now, PairSources{dout[i], gate, up}, mx_plain_row() + row);
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

// Both gradients, [rows, columns] of whole tiles, quantized in the same way, which `mx_is_plain`.
// Blocks of 256 x 2 threads, as many CTAs as the device holds or fewer.
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
