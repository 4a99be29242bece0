// Tiles of a product of two MXFP8 matrices, both stored by depth, on tcgen05: beside the operands,
// which are codes, stand their scales. See mma/sm100_tile.cuh for the frame.
//
// Two warps, one for each operand, read scales where they lie, by rows, four pieces of depth ahead,
// and write them as the tiles of 512 bytes that tcgen05.cp takes. Copies of scales and products of
// one thread run in the order in which it asks for them, so that one place in tensor memory serves
// all stages.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "mma/sm100_tile.cuh"

namespace sm100_mxfp8 {

using namespace sm100;

constexpr int kScaleBlock = 32;
constexpr int kScaleRows = 128;       // of a scale tile
constexpr int kScaleTileBytes = 512;  // four scales of each row
constexpr int kScaleTileColumns = 4;  // in tensor memory
constexpr int kScalesWarpA = kFirstSideWarp;
constexpr int kScalesWarpB = kFirstSideWarp + 1;
constexpr uint32 kUnitScales = 0x7f7f7f7fu;  // four scales of one

// Scale tiles of the a of a block and of the whole b of a tile of `columns`.
constexpr int scale_tiles(int columns) {
    return 1 + columns / kScaleRows;
}

template <int kBlocks, int kTileN>
struct Shape : TileShape<kBlocks, kTileN, scale_tiles(kTileN) * kScaleTileBytes,
                         scale_tiles(kTileN) * kScaleTileColumns, 2> {
    static constexpr int kScaleTiles = scale_tiles(kTileN);
    static_assert(kTileN % kScaleRows == 0, "whole scale tiles");
};

// An operand's scales [rows, blocks], by rows.
struct Scales {
    const uint8* data;
    int32 rows;
    int32 blocks;
};

// Scales 16 * group to 16 * group + 15 of a row, four to a word; ones where there are none.
__device__ __forceinline__ uint4 scale_group(const Scales& scales, int32 row, int32 group) {
    uint32 words[4] = {kUnitScales, kUnitScales, kUnitScales, kUnitScales};
    if (row < scales.rows) {
        const uint8* first = scales.data + static_cast<int64>(row) * scales.blocks + group * 16;
        const int32 left = scales.blocks - group * 16;
        if (scales.blocks % 16 == 0) {
            return __ldg(reinterpret_cast<const uint4*>(first));
        }
        if (scales.blocks % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (4 * i < left) {
                    words[i] = __ldg(reinterpret_cast<const uint32*>(first) + i);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i < left) {
                    const uint32 code = __ldg(first + i);
                    words[i / 4] ^= (code ^ 0x7f) << (8 * (i % 4));
                }
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint32 word_of(const uint4& words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Scales of kTiles * 128 rows for four pieces of depth: the calling lane's rows of each scale tile.
template <int kTiles>
struct ScaleWords {
    uint4 words[kTiles][4];

    __device__ __forceinline__ void load(const Scales& scales, int32 row, int32 group) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int32 at = row + tile * kScaleRows + i * 32 + threadIdx.x % 32;
                words[tile][i] = scale_group(scales, at, group);
            }
        }
    }
};

// The scales of one operand, by one warp: `row_of(place)` is its first row in a tile, and its scale
// tiles are number kFirst and following of a stage.
template <typename S, int kFirst, int kTiles, typename Tiles, typename Row>
__device__ __forceinline__ void fetch_scales(const Shared<S>& shared, const Scales& scales,
                                             Tiles tiles, int32 pieces, Row row_of) {
    const uint32 lane = threadIdx.x % 32;
    const int32 groups = (pieces + 3) / 4;
    Ring<S::kStages> ring;
    for (TilePlace place; tiles.next(place);) {
        const int32 row = row_of(place);
        ScaleWords<kTiles> next;
        next.load(scales, row, 0);
        for (int32 group = 0; group < groups; ++group) {
            const ScaleWords<kTiles> current = next;
            if (group + 1 < groups) {
                next.load(scales, row, group + 1);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (group * 4 + i < pieces) {
                    wait<S>(shared.empty + ring.index, ring.phase ^ 1);
                    uint8* target = shared.side + ring.index * S::kSideBytes +
                                    kFirst * kScaleTileBytes + lane * 16;
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
                        *reinterpret_cast<uint4*>(target + j * kScaleTileBytes) =
                            make_uint4(word_of(current.words[j][0], i),
                                       word_of(current.words[j][1], i),
                                       word_of(current.words[j][2], i),
                                       word_of(current.words[j][3], i));
                    }
                    fence_before_copies();
                    __syncwarp();
                    if (lane == 0) {
                        arrive_at_first<S>(shared.full + ring.index);
                    }
                    ring.advance();
                }
            }
        }
    }
}

// The codes of both operands, by one thread of each block.
template <typename S, typename Tiles>
__device__ __forceinline__ void copy_codes(const Shared<S>& shared, const TensorMap& a,
                                           const TensorMap& b, Tiles tiles, int32 pieces) {
    const uint32 rank = rank_in_pair<S>();
    const Sharers of_a = sharers_of_a<S>();
    const Sharers of_b = sharers_of_b<S>();
    copy_operands(shared, tiles, pieces,
                  [&](const TilePlace& place, int32 piece, uint8* target, uint32 barrier) {
                      const uint32 depth = piece * kDepthBytes;
                      copy_box<S, 1>(target, a, depth, place.row + rank * kBlockM, barrier, of_a);
                      copy_box<S, 1>(target + S::kABytes, b, depth,
                                     place.column + rank * S::kBlockN, barrier, of_b);
                  });
}

// The products, by one thread (of the first block of a pair). Scales come after the
// accumulators in tensor memory.
template <typename S, typename Tiles>
__device__ __forceinline__ void multiply_codes(const Shared<S>& shared, uint32 tensor_base,
                                               Tiles tiles, int32 pieces) {
    const uint32 a_scales = tensor_base + S::kFirstSideColumn;
    const uint32 b_scales = a_scales + kScaleTileColumns;
    const uint32 codes = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    const uint32 scales = static_cast<uint32>(__cvta_generic_to_shared(shared.side));
    multiply(shared, tensor_base, tiles, pieces, [&](uint32 target, int32 piece, uint32 stage) {
#pragma unroll
        for (int i = 0; i < S::kScaleTiles; ++i) {
            const uint32 source = scales + stage * S::kSideBytes + i * kScaleTileBytes;
            tcgen05_copy_to_all_warps<S::kBlocks>(a_scales + i * kScaleTileColumns,
                                                  tcgen05_scale_tile(source));
        }
        const uint32 a_codes = codes + stage * S::kOperandBytes;
        const uint32 b_codes = a_codes + S::kABytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            tcgen05_multiply_mxf8<S::kBlocks>(
                target, tcgen05_swizzled_matrix(a_codes + step * kStepBytes),
                tcgen05_swizzled_matrix(b_codes + step * kStepBytes),
                tcgen05_mxf8_instruction(S::kTileM, S::kTileN, step), a_scales, b_scales,
                piece > 0 || step > 0);
        }
    });
}

}  // namespace sm100_mxfp8
