// Block quantization of a matrix to MXFP8: codes and scales along rows, down columns (stored
// transposed), or both from one read of the source, and the counters of what happened.
//
// Blocks take tiles of 128 x 128 elements in turn: a grid as large as the device holds at a time,
// so that few partial counts are left to the last block. 128 rows because a column group may be
// as tall, and because the transposed copy is then written in lines of 128 bytes; what a tile does
// is told in `layout/mx_tile.cuh`, and in `layout/mx_plain_tile.cuh` for BF16 matrices of whole
// tiles, of which the next one is copied while a block computes one. (With cp.async in place of
// bulk copies more went through the L2 cache, and all took a tenth longer.)
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/mx_plain_tile.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"

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

// What a block needs beside the tile and the stage.
struct PlainShared {
    MxPlainShared tile;
    alignas(16) uint32 column_scales[kMxTile][4];
    uint64 arrived;  // the tile that comes
};
union Shared {
    PlainShared plain;
    MxShared tile;
};

// Tiles that a block takes one below the other, so that it can write the scales of a column's
// blocks together: as many as leave no block with more to do than tiles one by one would.
__device__ __forceinline__ uint32 tiles_together(uint32 tiles, uint32 down) {
    const uint32 turns = (tiles + gridDim.x - 1) / gridDim.x;
    uint32 together = 4;
    while (together > 1 && (down % together != 0 || turns % together != 0)) {
        together /= 2;
    }
    return together;
}

// Quantizes tiles that are plain; while it computes one, the next one is on its way. Dynamic shared
// memory: the tile that comes, and the stage.
template <bool kWide, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_plain(const TensorMap& source, const MxTarget& to,
                                               uint4* dynamic, PlainShared& of_block,
                                               MxCounters& counters) {
    MxPlainShared& shared = of_block.tile;
    uint32(&column_scales)[kMxTile][4] = of_block.column_scales;
    uint64& arrived = of_block.arrived;
    const MxTeam team = MxTeam::mine();
    const uint4* const own =
        dynamic + mx_plain_row(team) * kMxRowLanes + team.thread % kMxRowLanes;
    uint4* const stage = dynamic + kMxTile * kMxRowLanes;
    const uint32 across = to.columns / kMxTile, down = to.rows / kMxTile;
    const uint32 tiles = across * down, together = tiles_together(tiles, down);
    // Tile number `turn` of this block: its first row and column, or rows beyond the matrix.
    const auto tile_of = [&](uint32 turn) {
        const uint32 pile = turn / together * gridDim.x + blockIdx.x;
        return make_uint2((pile / across * together + turn % together) * kMxTile,
                          pile % across * kMxTile);
    };
    const auto start = [&](uint32 turn) {
        const uint2 at = tile_of(turn);
        if (team.thread == 0 && at.x < to.rows) {
            mbarrier_expect(&arrived, MxTile<bf16>::kTileBytes);
            tensor_copy_2d(dynamic, source, at.y, at.x, &arrived);
        }
    };
    if (team.thread == 0) {
        mbarrier_init(&arrived);
    }
    __syncthreads();
    start(0);
    for (uint32 turn = 0;; ++turn) {
        const uint2 at = tile_of(turn);
        if (at.x >= to.rows) {
            break;
        }
        mbarrier_wait(&arrived, turn % 2);
        uint4 pieces[kMxPlainRows];
#pragma unroll
        for (int i = 0; i < kMxPlainRows; ++i) {
            pieces[i] = own[i * kMxRowLanes];
        }
        fence_before_copies();
        team.sync();
        start(turn + 1);
        mx_quantize_pieces<kWide, kRow, kColumn>(
            pieces, at.x, at.y, to, stage, shared, team,
            [&](uint32 column, uint32 scales) {
                column_scales[column][turn % together] = scales;
            },
            counters);
        if (kColumn && turn % together == together - 1 && team.thread < kMxTile) {
            const uint32 first = at.x / kMxTile + 1 - together;
            uint32* const target = reinterpret_cast<uint32*>(to.scales_t) +
                                   static_cast<uint64>(at.y + team.thread) * down + first;
            const uint32* const from = column_scales[team.thread];
            if (together == 4) {
                *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(from);
            } else if (together == 2) {
                *reinterpret_cast<uint2*>(target) = *reinterpret_cast<const uint2*>(from);
            } else {
                *target = *from;
            }
        }
    }
}

template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize_tiles(const E* __restrict__ x, const MxTarget& to,
                                               uint32 flags, uint4* dynamic, MxShared& shared,
                                               MxCounters& counters) {
    uint32* const tile = reinterpret_cast<uint32*>(dynamic);
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
}

template <typename E, bool kRow, bool kColumn>
__device__ __forceinline__ void quantize(const TensorMap& source, const E* __restrict__ x,
                                         const MxTarget& to, uint32 flags, uint64* partials,
                                         uint32* ticket, uint64* statistics) {
    extern __shared__ __align__(128) uint4 dynamic[];
    __shared__ Shared shared;
    MxCounters counters;
    bool done = false;
    if constexpr (MxElement<E>::kPerWord == 2) {
        done = mx_is_plain(to, flags);
        if (done && (flags & kMxWide)) {
            quantize_plain<true, kRow, kColumn>(source, to, dynamic, shared.plain, counters);
        } else if (done) {
            quantize_plain<false, kRow, kColumn>(source, to, dynamic, shared.plain, counters);
        }
    }
    if (!done) {
        quantize_tiles<E, kRow, kColumn>(x, to, flags, dynamic, shared.tile, counters);
    }
    const uint64 copies = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    mx_write_statistics(counters, blockIdx.x, gridDim.x, partials, ticket,
                                             copies * to.rows * to.columns, statistics);
}

// x [rows, columns], and where it is BF16 of whole pieces of 16 bytes, `source`, the same in boxes
// of a tile each; outputs as in `MxTarget`; flags of `layout/mx_scale.cuh`; partials
// [gridDim.x, 5]; statistics [6]. All 16-byte aligned.
#define QUANTIZE_KERNEL(name, E, row, column, blocks_per_sm)                                      \
    extern "C" __global__ void __launch_bounds__(MxTile<E>::kThreads, blocks_per_sm)              \
        name(const __grid_constant__ TensorMap source, const E* __restrict__ x,                   \
             uint8* __restrict__ codes, uint8* __restrict__ scales, uint8* __restrict__ codes_t,  \
             uint8* __restrict__ scales_t, uint32 rows, uint32 columns, uint32 flags,             \
             uint64* partials, uint32* ticket, uint64* statistics) {                              \
        const MxTarget to = {codes, scales, codes_t, scales_t, rows, columns};                    \
        quantize<E, row, column>(source, x, to, flags, partials, ticket, statistics);             \
    }

QUANTIZE_KERNEL(quantize_bf16_row, bf16, true, false, 4)
QUANTIZE_KERNEL(quantize_bf16_column, bf16, false, true, 4)
QUANTIZE_KERNEL(quantize_bf16_both, bf16, true, true, 4)
QUANTIZE_KERNEL(quantize_f32_row, float, true, false, 2)
QUANTIZE_KERNEL(quantize_f32_column, float, false, true, 2)
QUANTIZE_KERNEL(quantize_f32_both, float, true, true, 2)
