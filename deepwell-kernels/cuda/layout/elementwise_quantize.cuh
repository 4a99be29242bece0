// A function of the elements of one, two or three matrices and the block quantization of its
// result: each source is read once, and of the result itself nothing is written but where somebody
// else reads it.
//
// A CTA has a tile of 128 x 128 elements, so that SMs take tiles as they come free: on an H200 a
// grid that is as large as the device and goes from tile to tile is slower.
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

// Where the vectors of this thread lie in the matrices, all [rows, columns] with columns a multiple
// of 8.
struct ElementPlaces {
    uint32 row0;
    uint32 column0;
    uint32 rows;
    uint32 columns;

    // Tile `index` of the matrices of `to`.
    __device__ __forceinline__ ElementPlaces(uint32 index, const MxTarget& to)
        : rows(to.rows), columns(to.columns) {
        const uint32 across = (columns + kMxTile - 1) / kMxTile;
        row0 = index / across * kMxTile;
        column0 = index % across * kMxTile;
    }

    // No memory holds 2^32 of them.
    static __device__ __forceinline__ uint32 tiles(const MxTarget& to) {
        return (to.rows + kMxTile - 1) / kMxTile * ((to.columns + kMxTile - 1) / kMxTile);
    }

    __device__ __forceinline__ bool exists(int step) const {
        return row0 + ElementTile::row() + step * kMxStepRows < rows &&
               column0 + ElementTile::column() < columns;
    }
    __device__ __forceinline__ uint64 place(int step) const {
        const uint32 row = row0 + ElementTile::row() + step * kMxStepRows;
        return static_cast<uint64>(row) * columns + column0 + ElementTile::column();
    }
    __device__ __forceinline__ uint4 load(const bf16* matrix, int step) const {
        return exists(step) ? *reinterpret_cast<const uint4*>(matrix + place(step))
                            : make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void store(bf16* matrix, int step, const uint4& vector) const {
        if (exists(step)) {
            *reinterpret_cast<uint4*>(matrix + place(step)) = vector;
        }
    }
};

// The results of this thread's vectors of one step.
template <int kSources, typename Function>
__device__ __forceinline__ uint4 element_results(const uint4 (&vectors)[kSources],
                                                 const Function& function) {
    float values[kSources][8];
#pragma unroll
    for (int s = 0; s < kSources; ++s) {
        unpack_bf16x8(vectors[s], values[s]);
    }
    float results[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float of_element[kSources];
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
            of_element[s] = values[s][j];
        }
        results[j] = function(of_element);
    }
    return pack_bf16x8(results);
}

// A tile of `layout/mx_plain_tile.cuh`.
template <bool kWide, bool kRow, bool kColumn, int kSources, typename Function>
__device__ __forceinline__ void elementwise_quantize_plain(const bf16* const (&sources)[kSources],
                                                           bf16* result, const MxTarget& to,
                                                           uint4* stage, MxPlainShared& shared,
                                                           MxTally& tally,
                                                           const Function& function) {
    const uint32 across = to.columns / kMxTile;
    const uint32 row0 = blockIdx.x / across * kMxTile, column0 = blockIdx.x % across * kMxTile;
    const uint64 first =
        static_cast<uint64>(row0 + mx_plain_row()) * to.columns + column0 + mx_plain_column();
    uint4 results[kMxPlainRows];
#pragma unroll
    for (int row = 0; row < kMxPlainRows; row += kTogether) {
        uint4 vectors[kTogether][kSources];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const uint64 place = first + static_cast<uint64>(row + i) * to.columns;
#pragma unroll
            for (int s = 0; s < kSources; ++s) {
                vectors[i][s] = *reinterpret_cast<const uint4*>(sources[s] + place);
            }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            results[row + i] = element_results(vectors[i], function);
            if (result != nullptr) {
                const uint64 place = first + static_cast<uint64>(row + i) * to.columns;
                *reinterpret_cast<uint4*>(result + place) = results[row + i];
            }
        }
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(results, row0, column0, to, stage, shared, tally);
}

// Any tile.
template <bool kRow, bool kColumn, int kSources, typename Function>
__device__ __forceinline__ void elementwise_quantize_tile(const bf16* const (&sources)[kSources],
                                                          bf16* result, const MxTarget& to,
                                                          uint32 flags, uint32* tile,
                                                          MxTally& tally,
                                                          const Function& function) {
    __shared__ MxShared shared;
    MxCounters counters;
    if (blockIdx.x < ElementPlaces::tiles(to)) {
        const ElementPlaces places(blockIdx.x, to);
#pragma unroll 2
        for (int step = 0; step < kMxSteps; ++step) {
            uint4 vectors[kSources];
#pragma unroll
            for (int s = 0; s < kSources; ++s) {
                vectors[s] = places.load(sources[s], step);
            }
            const uint4 vector = element_results(vectors, function);
            if (result != nullptr) {
                places.store(result, step, vector);
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

// Result `function(elements of the sources)`, of zeros zero; `result` may be null. Flags, totals
// and statistics [6] as in `quantize.cu`; a CTA for each tile, or one where there is none.
template <bool kRow, bool kColumn, int kSources, typename Function>
__device__ __forceinline__ void elementwise_quantize(const bf16* const (&sources)[kSources],
                                                     bf16* result, const MxTarget& to,
                                                     uint32 flags, MxTotals* totals,
                                                     uint64* statistics,
                                                     const Function& function) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxPlainShared shared;
    __shared__ MxTallyShared of_tally;
    MxTally tally(of_tally, totals);
    if (!mx_is_plain(to, flags)) {
        elementwise_quantize_tile<kRow, kColumn>(sources, result, to, flags,
                                                 reinterpret_cast<uint32*>(dynamic), tally,
                                                 function);
    } else if (flags & kMxWide) {
        elementwise_quantize_plain<true, kRow, kColumn>(sources, result, to, dynamic, shared,
                                                        tally, function);
    } else {
        elementwise_quantize_plain<false, kRow, kColumn>(sources, result, to, dynamic, shared,
                                                         tally, function);
    }
    const uint64 operands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    tally.finish(gridDim.x, operands * to.rows * to.columns, statistics);
}
