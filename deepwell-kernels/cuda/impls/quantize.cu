// Block quantization of a matrix to MXFP8: codes and scales along rows, down columns (stored
// transposed), or both from one read of the source, and the counters of what happened.
//
// Blocks take tiles of 128 x 128 elements in turn: a grid as large as the device holds at a time,
// so that few partial counts are left to the last block. 128 rows because a column group may be
// as tall, and because the transposed copy is then written in lines of 128 bytes; what a tile does
// is told in `layout/mx_tile.cuh`.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"

// The pieces of this thread in the tile at (row0, column0).
template <typename E>
__device__ __forceinline__ void load_pieces(const E* __restrict__ x, uint32 row0, uint32 column0,
                                            uint32 rows, uint32 columns,
                                            uint4 (&pieces)[kMxSteps]) {
    using Tile = MxTile<E>;
    const uint32 first_row = row0 + Tile::row();
    const uint32 column = column0 + Tile::column();
    const E* const first = x + static_cast<uint64>(first_row) * columns + column;
    const uint64 stride = static_cast<uint64>(kMxStepRows) * columns;
    if (columns % Tile::kPiece == 0) {
#pragma unroll
        for (int step = 0; step < kMxSteps; ++step) {
            const bool exists = first_row + step * kMxStepRows < rows && column < columns;
            pieces[step] = make_uint4(0, 0, 0, 0);
            if (exists) {
                pieces[step] = *reinterpret_cast<const uint4*>(first + step * stride);
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
            for (int i = 0; i < Tile::kPiece; ++i) {
                if (column + i < columns) {
                    const Bits bits = reinterpret_cast<const Bits*>(first + step * stride)[i];
                    words[i / kPerWord] |= static_cast<uint32>(bits) << (i % kPerWord * 16);
                }
            }
        }
        pieces[step] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize(const E* __restrict__ x, const MxTarget& to, uint32 flags,
                                         uint64* partials, uint32* ticket, uint64* statistics) {
    using Tile = MxTile<E>;
    extern __shared__ uint4 dynamic[];
    uint32* const tile = reinterpret_cast<uint32*>(dynamic);
    __shared__ MxShared shared;
    MxCounters counters;
    const uint32 tiles_across = (to.columns + kMxTile - 1) / kMxTile;
    // No memory holds 2^32 tiles.
    const uint32 tiles = (to.rows + kMxTile - 1) / kMxTile * tiles_across;
    for (uint32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        const uint32 row0 = index / tiles_across * kMxTile;
        const uint32 column0 = index % tiles_across * kMxTile;
        uint4 pieces[kMxSteps];
        load_pieces(x, row0, column0, to.rows, to.columns, pieces);
        mx_begin_tile();
#pragma unroll
        for (int step = 0; step < kMxSteps; ++step) {
            mx_piece<E>(tile, step) = pieces[step];
        }
        mx_quantize_tile<E, kRow, kColumn>(row0, column0, to, flags, tile, shared, counters);
    }
    const uint64 copies = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    mx_write_statistics<Tile::kThreads>(counters, blockIdx.x, gridDim.x, partials, ticket,
                                        copies * to.rows * to.columns, statistics);
}

// x [rows, columns]; outputs as in `MxTarget`; flags of `layout/mx_scale.cuh`; partials
// [gridDim.x, 5]; statistics [6]. All 16-byte aligned.
#define QUANTIZE_KERNEL(name, E, row, column, blocks_per_sm)                                      \
    extern "C" __global__ void __launch_bounds__(MxTile<E>::kThreads, blocks_per_sm)              \
        name(const E* __restrict__ x, uint8* __restrict__ codes, uint8* __restrict__ scales,      \
             uint8* __restrict__ codes_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, uint64* partials, uint32* ticket,                      \
             uint64* statistics) {                                                                \
        const MxTarget to = {codes, scales, codes_t, scales_t, rows, columns};                    \
        quantize<E, row, column>(x, to, flags, partials, ticket, statistics);                     \
    }

QUANTIZE_KERNEL(quantize_bf16_row, bf16, true, false, 4)
QUANTIZE_KERNEL(quantize_bf16_column, bf16, false, true, 4)
QUANTIZE_KERNEL(quantize_bf16_both, bf16, true, true, 4)
QUANTIZE_KERNEL(quantize_f32_row, float, true, false, 2)
QUANTIZE_KERNEL(quantize_f32_column, float, false, true, 2)
QUANTIZE_KERNEL(quantize_f32_both, float, true, true, 2)
