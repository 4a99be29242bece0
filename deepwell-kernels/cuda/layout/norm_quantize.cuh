// A normalization of rows and the block quantization of its output, from one read of the source.
//
// Column blocks need 32 or 128 rows of y together, and y needs the statistics of whole rows: 128
// rows at a time, then. They are more than a multiprocessor holds, so a cluster of up to eight
// blocks takes them, each block some slices of 128 columns:
//
//   1. Each block copies its slices to shared memory, adds delta and stores the sum where there is
//      one, and sums the squares of each row of each slice (for a layer normalization first the
//      distances from the row's first element, and later the squared distances from its mean).
//   2. The blocks read those sums from each other; each finishes some rows and hands their rstd
//      (or mean) to all.
//   3. Each block normalizes a slice in place and quantizes it as in `layout/mx_tile.cuh`.
//
// At most `kHeld` slices stay in shared memory, so that three blocks fit on a multiprocessor, some
// computing while others wait for memory; longer rows read the rest again, which the L2 cache
// still has. Sums over a row go in the order of `common/row_sum.cuh`, so that y has the bits that
// the normalization alone gives.
#pragma once

#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"
#include "layout/norm_value.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"

using NormTile = MxTile<bf16>;
constexpr int kHeld = 2;
static_assert(kMxTile == kSlice, "slices of a row's sum are columns of a tile");
static_assert(NormTile::kRowLanes == kSlicePieces, "sixteen threads hold a slice");

// What is normalized, and where all but the quantized copies go. Matrices are [rows, columns] of
// `MxTarget`; columns are a multiple of 8.
struct NormOperands {
    const bf16* x;
    const bf16* delta;   // with a sum before
    const bf16* weight;  // [columns]
    const bf16* bias;    // [columns], of a layer normalization
    bf16* sum;           // with a sum before
    bf16* y;             // null where nobody else reads it
    float* mean;         // [rows], of a layer normalization
    float* rstd;         // [rows]
    float eps;
};

// How a row lies over the cluster.
struct NormShape {
    uint32 slices;            // of a row
    uint32 slices_per_block;  // all but the last block have as many
    uint32 held;              // of those in shared memory, at most kHeld
    uint32 blocks;            // of the cluster
};

// Dynamic shared memory: tiles [held], then FP32 sums [slices_per_block, 128], mean and rstd
// [128] each.
template <bool kLayer, bool kAdd, bool kRow, bool kColumn>
struct NormQuantize {
    const NormOperands& operands;
    const MxTarget& to;
    const NormShape& shape;
    uint32* tiles;
    float* sums;
    float* means;
    float* rstds;
    uint32 rank;
    uint32 row0;
    uint32 first_slice;
    uint32 slices;  // of this block

    __device__ __forceinline__ NormQuantize(const NormOperands& operands, const MxTarget& to,
                                            const NormShape& shape, uint4* dynamic)
        : operands(operands), to(to), shape(shape) {
        tiles = reinterpret_cast<uint32*>(dynamic);
        sums = reinterpret_cast<float*>(tiles + shape.held * (NormTile::kTileBytes / 4));
        means = sums + shape.slices_per_block * kMxTile;
        rstds = means + kMxTile;
        rank = blockIdx.x % shape.blocks;
        row0 = blockIdx.x / shape.blocks * kMxTile;
        first_slice = rank * shape.slices_per_block;
        slices = min(shape.slices_per_block, shape.slices - first_slice);
    }

    __device__ __forceinline__ uint32* tile(uint32 slice) const {
        return tiles + slice * (NormTile::kTileBytes / 4);
    }
    // First column of this thread in a slice.
    __device__ __forceinline__ uint32 column(uint32 slice) const {
        return (first_slice + slice) * kSlice + NormTile::column();
    }
    // This thread's row in a tile.
    __device__ __forceinline__ uint32 row(int step) const {
        return NormTile::row() + step * kMxStepRows;
    }
    __device__ __forceinline__ bool exists(uint32 slice, int step) const {
        return row0 + row(step) < to.rows && column(slice) < to.columns;
    }
    // Where this thread's piece lies in a matrix.
    __device__ __forceinline__ uint64 place(uint32 slice, int step) const {
        return static_cast<uint64>(row0 + row(step)) * to.columns + column(slice);
    }
    __device__ __forceinline__ uint4 load(const bf16* matrix, uint32 slice, int step) const {
        return exists(slice, step)
                   ? *reinterpret_cast<const uint4*>(matrix + place(slice, step))
                   : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void store(bf16* matrix, uint32 slice, int step,
                                          const uint4& piece) const {
        if (exists(slice, step)) {
            *reinterpret_cast<uint4*>(matrix + place(slice, step)) = piece;
        }
    }
    // What is normalized of a slice that is not held: this thread wrote the sum itself.
    __device__ __forceinline__ uint4 reload(uint32 slice, int step) const {
        return load(kAdd ? operands.sum : operands.x, slice, step);
    }

    // Adds `value`, a number of this thread's piece, over the row of a slice.
    __device__ __forceinline__ void put_sum(uint32 slice, int step, float value) const {
        const float of_slice = sum_of_16_lanes(value);
        if (threadIdx.x % kSlicePieces == 0) {
            sums[slice * kMxTile + row(step)] = of_slice;
        }
    }
    // First element of a row of what is normalized; zero beyond the matrix.
    __device__ __forceinline__ float first_of(uint32 row) const {
        if (row0 + row >= to.rows) {
            return 0.0f;
        }
        const uint64 index = static_cast<uint64>(row0 + row) * to.columns;
        const float value = to_f32(operands.x[index]);
        return kAdd ? to_f32(to_bf16(value + to_f32(operands.delta[index]))) : value;
    }
    __device__ __forceinline__ void put_first_sum(uint32 slice, int step,
                                                  const uint4& piece) const {
        if (kLayer) {
            const float distances = sum_of_distances(piece, first_of(row(step)));
            put_sum(slice, step, column(slice) < to.columns ? distances : 0.0f);
        } else {
            float values[8];
            unpack_bf16x8(piece, values);
            put_sum(slice, step, sum_of_squares(values));
        }
    }

    __device__ __forceinline__ void start_copies(uint32 slice) const {
#pragma unroll
        for (int step = 0; step < kMxSteps; ++step) {
            const bool real = exists(slice, step);
            const bf16* const source = operands.x + (real ? place(slice, step) : 0);
            uint4& target = mx_piece<bf16>(tile(slice), step);
            cp_async_16(static_cast<uint32>(__cvta_generic_to_shared(&target)), source,
                        real ? 16 : 0);
        }
    }

    // Step 1 for a held slice, while at most `kLater` copies of later ones are under way.
    template <int kLater>
    __device__ __forceinline__ void sum_held_slice(uint32 slice) const {
        uint4 deltas[kMxSteps];
        if (kAdd) {
#pragma unroll
            for (int step = 0; step < kMxSteps; ++step) {
                deltas[step] = load(operands.delta, slice, step);
            }
        }
        cp_async_wait<kLater>();
#pragma unroll
        for (int step = 0; step < kMxSteps; ++step) {
            uint4 piece = mx_piece<bf16>(tile(slice), step);
            if (kAdd) {
                piece = add_bf16x8(piece, deltas[step]);
                mx_piece<bf16>(tile(slice), step) = piece;
                store(operands.sum, slice, step, piece);
            }
            put_first_sum(slice, step, piece);
        }
    }

    // Step 1 for a slice that there is no room for.
    __device__ __forceinline__ void sum_other_slice(uint32 slice) const {
#pragma unroll 4
        for (int step = 0; step < kMxSteps; ++step) {
            uint4 piece = load(operands.x, slice, step);
            if (kAdd) {
                piece = add_bf16x8(piece, load(operands.delta, slice, step));
                store(operands.sum, slice, step, piece);
            }
            put_first_sum(slice, step, piece);
        }
    }

    // Step 2: makes `finish(total, row)` of the total of each row, into `result` of all blocks, and
    // into `stored` [rows].
    template <typename Finish>
    __device__ __forceinline__ void exchange(float* result, float* stored,
                                             const Finish& finish) const {
        cluster_sync();
        const uint32 warps = NormTile::kThreads / 32;
        const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        for (uint32 row = rank * warps + warp; row < kMxTile; row += shape.blocks * warps) {
            const float total = sum_of_slices(shape.slices, [&](uint32 slice) {
                const uint32 in_block = slice % shape.slices_per_block;
                return cluster_load(cluster_address(sums + in_block * kMxTile + row,
                                                    slice / shape.slices_per_block));
            });
            const float finished = finish(total, row);
            if (lane < shape.blocks) {
                cluster_store(cluster_address(result + row, lane), finished);
            }
            if (lane == 0 && row0 + row < to.rows) {
                stored[row0 + row] = finished;
            }
        }
        cluster_sync();
    }

    __device__ __forceinline__ uint4 normalized(const uint4& piece, int step, const uint4& weight,
                                                const uint4& bias) const {
        const float rstd = rstds[row(step)];
        return kLayer ? layer_normalized(piece, means[row(step)], rstd, weight, bias)
                      : rms_normalized(piece, rstd, weight);
    }

    // Step 3 for one slice.
    __device__ __forceinline__ void quantize_slice(uint32 slice, uint32 flags, MxShared& shared,
                                                   MxCounters& counters) const {
        const bool held = slice < shape.held;
        uint32* const own = tile(held ? slice : 0);
        const bool real = column(slice) < to.columns;
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 weight =
            real ? *reinterpret_cast<const uint4*>(operands.weight + column(slice)) : zero;
        const uint4 bias =
            kLayer && real ? *reinterpret_cast<const uint4*>(operands.bias + column(slice)) : zero;
        mx_begin_tile();
#pragma unroll 4
        for (int step = 0; step < kMxSteps; ++step) {
            const uint4 piece = held ? mx_piece<bf16>(own, step) : reload(slice, step);
            // Beyond the matrix there are zeros, whatever the mean.
            const uint4 y = exists(slice, step) ? normalized(piece, step, weight, bias) : zero;
            if (operands.y != nullptr) {
                store(operands.y, slice, step, y);
            }
            mx_piece<bf16>(own, step) = y;
        }
        mx_quantize_tile<bf16, kRow, kColumn>(row0, (first_slice + slice) * kSlice, to, flags, own,
                                              shared, counters);
    }

    __device__ __forceinline__ void run(uint32 flags, MxShared& shared,
                                        MxCounters& counters) const {
        const uint32 in_memory = min(slices, shape.held);
#pragma unroll
        for (int slice = 0; slice < kHeld; ++slice) {
            if (slice < in_memory) {
                start_copies(slice);
            }
            cp_async_commit();
        }
        if (in_memory > 0) {
            sum_held_slice<1>(0);
        }
        if (in_memory > 1) {
            sum_held_slice<0>(1);
        }
        for (uint32 slice = in_memory; slice < slices; ++slice) {
            sum_other_slice(slice);
        }
        const uint32 columns = to.columns;
        const float eps = operands.eps;
        if (kLayer) {
            exchange(means, operands.mean, [&](float total, uint32 row) {
                return mean_from(first_of(row), total, columns);
            });
            for (uint32 slice = 0; slice < slices; ++slice) {
#pragma unroll 4
                for (int step = 0; step < kMxSteps; ++step) {
                    const uint4 piece = slice < shape.held ? mx_piece<bf16>(tile(slice), step)
                                                           : reload(slice, step);
                    const float squares = sum_of_squared_distances(piece, means[row(step)]);
                    put_sum(slice, step, column(slice) < columns ? squares : 0.0f);
                }
            }
        }
        exchange(rstds, operands.rstd,
                 [=](float total, uint32) { return rms_rstd(total, columns, eps); });
        for (uint32 slice = 0; slice < slices; ++slice) {
            quantize_slice(slice, flags, shared, counters);
        }
    }
};

// The whole kernel; `partials` [gridDim.x, 5], `statistics` [6].
template <bool kLayer, bool kAdd, bool kRow, bool kColumn>
__device__ __forceinline__ void norm_quantize(const NormOperands& operands, const MxTarget& to,
                                              const NormShape& shape, uint32 flags,
                                              uint64* partials, uint32* ticket,
                                              uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxShared shared;
    MxCounters counters;
    const NormQuantize<kLayer, kAdd, kRow, kColumn> block(operands, to, shape, dynamic);
    block.run(flags, shared, counters);
    const uint64 copies = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    mx_write_statistics<NormTile::kThreads>(counters, blockIdx.x, gridDim.x, partials, ticket,
                                            copies * to.rows * to.columns, statistics);
}
