// Block quantization of a matrix to MXFP8: data and scales along rows, down columns (stored
// transposed), or both from one read of the source, and counters of underflows, saturations and
// other events.
//
// A CTA has a tile of 128 x 128 elements: 128 rows because a column group may be as tall, and
// because the transposed operand is then written in lines of 128 bytes. `layout/mx_tile.cuh`
// documents the work on a tile, and `layout/mx_plain_tile.cuh` the work on BF16 matrices of whole
// tiles.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/mx_plain_tile.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"

// Loads this thread's vectors of the tile at (row0, column0).
template <typename E>
__device__ __forceinline__ void load_vectors(const E* __restrict__ x, uint32 row0, uint32 column0,
                                            uint32 rows, uint32 columns,
                                            uint4 (&vectors)[kMxSteps]) {
    using Tile = MxTile<E>;
    const uint32 first_row = row0 + Tile::row();
    const uint32 column = column0 + Tile::column();
    const E* const first = x + static_cast<uint64>(first_row) * columns + column;
    const uint64 stride = static_cast<uint64>(kMxStepRows) * columns;
    if (columns % Tile::kVector == 0) {
#pragma unroll
        for (int step = 0; step < kMxSteps; ++step) {
            const bool exists = first_row + step * kMxStepRows < rows && column < columns;
            vectors[step] = make_uint4(0, 0, 0, 0);
            if (exists) {
                vectors[step] = *reinterpret_cast<const uint4*>(first + step * stride);
            }
        }
        return;
    }
    constexpr int kPerWord = MxElement<E>::kPerWord;
    using Bits = typename MxElement<E>::Bits;
#pragma unroll
    for (int step = 0; step < kMxSteps; ++step) {
        uint32 words[4] = {0, 0, 0, 0};
        if (first_row + step * kMxStepRows < rows) {
#pragma unroll
            for (int i = 0; i < Tile::kVector; ++i) {
                if (column + i < columns) {
                    const Bits bits = reinterpret_cast<const Bits*>(first + step * stride)[i];
                    words[i / kPerWord] |= static_cast<uint32>(bits) << (i % kPerWord * 16);
                }
            }
        }
        vectors[step] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Quantizes any tile.
template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_tile(const E* __restrict__ x, const MxTarget& to,
                                              uint32 flags, uint4* dynamic, MxTally& tally) {
    __shared__ MxShared shared;
    MxCounters counters;
    uint32* const tile = reinterpret_cast<uint32*>(dynamic);
    const uint32 tiles_across = (to.columns + kMxTile - 1) / kMxTile;
    // No memory holds 2^32 tiles, so the product fits.
    const uint32 tiles = (to.rows + kMxTile - 1) / kMxTile * tiles_across;
    if (blockIdx.x < tiles) {
        const uint32 row0 = blockIdx.x / tiles_across * kMxTile;
        const uint32 column0 = blockIdx.x % tiles_across * kMxTile;
        uint4 vectors[kMxSteps];
        load_vectors(x, row0, column0, to.rows, to.columns, vectors);
#pragma unroll
        for (int step = 0; step < kMxSteps; ++step) {
            mx_vector<E>(tile, step) = vectors[step];
        }
        mx_quantize_tile<E, kRow, kColumn>(row0, column0, to, flags, tile, shared, counters);
    }
    tally.leave(counters);
    __syncthreads();
    tally.give();
}

// Quantizes a tile of `layout/mx_plain_tile.cuh`.
template <bool kWide, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_plain(const bf16* __restrict__ x, const MxTarget& to,
                                               uint4* stage, MxTally& tally) {
    __shared__ MxPlainShared shared;
    const uint32 across = to.columns / kMxTile;
    const uint32 row0 = blockIdx.x / across * kMxTile, column0 = blockIdx.x % across * kMxTile;
    const bf16* const first =
        x + static_cast<uint64>(row0 + mx_plain_row()) * to.columns + column0 + mx_plain_column();
    uint4 vectors[kMxPlainRows];
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
        vectors[row] =
            *reinterpret_cast<const uint4*>(first + static_cast<uint64>(row) * to.columns);
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(vectors, row0, column0, to, stage, shared, tally);
}

template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize(const E* __restrict__ x, const MxTarget& to, uint32 flags,
                                         MxTotals* totals, uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxTallyShared of_tally;
    MxTally tally(of_tally, totals);
    bool done = false;
    if constexpr (MxElement<E>::kPerWord == 2) {
        done = mx_is_plain(to, flags);
        if (done && (flags & kMxWide)) {
            quantize_plain<true, kRow, kColumn>(x, to, dynamic, tally);
        } else if (done) {
            quantize_plain<false, kRow, kColumn>(x, to, dynamic, tally);
        }
    }
    if (!done) {
        quantize_tile<E, kRow, kColumn>(x, to, flags, dynamic, tally);
    }
    const uint64 operands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    tally.finish(gridDim.x * gridDim.y, operands * to.rows * to.columns * gridDim.y, statistics);
}

// x [matrices, rows, columns], each matrix quantized separately; outputs of each as in `MxTarget`;
// flags of `layout/mx_scale.cuh`; statistics [6] over all. All pointers 16-byte aligned. Grid: one
// CTA per tile along x, at least one, and per matrix along y.
#define QUANTIZE_KERNEL(name, E, row, column, blocks_per_sm)                                     \
    extern "C" __global__ void __launch_bounds__(MxTile<E>::kThreads, blocks_per_sm)             \
        name(const E* __restrict__ x, uint8* __restrict__ data, uint8* __restrict__ scales,      \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics) {               \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        const uint64 first = static_cast<uint64>(rows) * columns * blockIdx.y;                   \
        quantize<E, row, column>(x + first, to.of_stack(blockIdx.y), flags, totals, statistics); \
    }

QUANTIZE_KERNEL(quantize_bf16_row, bf16, true, false, 4)
QUANTIZE_KERNEL(quantize_bf16_column, bf16, false, true, 4)
QUANTIZE_KERNEL(quantize_bf16_both, bf16, true, true, 4)
QUANTIZE_KERNEL(quantize_f32_row, float, true, false, 2)
QUANTIZE_KERNEL(quantize_f32_column, float, false, true, 2)
QUANTIZE_KERNEL(quantize_f32_both, float, true, true, 2)
