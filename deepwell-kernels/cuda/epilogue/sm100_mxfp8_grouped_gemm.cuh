// Warp roles of a grouped MXFP8 GEMM on tcgen05: as of a dense GEMM, over tiles with their own
// K-blocks, or without any.
#pragma once

#include "common/types.cuh"
#include "epilogue/store_tensor_tile.cuh"
#include "mma/sm100_mxfp8_tile.cuh"
#include "ptx/elect.cuh"
#include "scheduler/sm100_grouped_tiles.cuh"

namespace sm100_grouped {

using namespace sm100_mxfp8;

// Copies data and scales of both operands, by one thread of each CTA. Scales cover `k` elements of
// a row.
template <typename S, typename Tiles>
__device__ __forceinline__ void copy_groups(const Shared<S>& shared, const Operand& a,
                                            const Operand& b, Tiles tiles, int32 k) {
    const uint32 rank = rank_in_pair<S>();
    const Sharers own{};
    const int32 scale_tiles_of_row = scale_tiles_across(k);
    copy_operands(shared, tiles, OfTile{},
                  [&](const GroupedTile& tile, int32 k_block, uint32 stage, uint32 barrier) {
                      const uint32 k = k_block * kStageRowBytes;
                      const uint32 row = tile.place.row + rank * kBlockM;
                      uint8* data = shared.operands + stage * S::kOperandBytes;
                      copy_rows<S, kBlockM, 1>(data, a.data, row, k, barrier, own);
                      copy_rows<S, S::kBlockN, 1>(data + S::kABytes, b.data,
                                                  tile.b_row + rank * S::kBlockN, k, barrier,
                                                  own);
                      uint8* scales = shared.side + stage * S::kSideBytes;
                      S::Format::template copy_scales<S, 1>(scales, a.scales, row, k_block,
                                                            scale_tiles_of_row, barrier, own);
                      S::Format::template copy_scales<S, S::kScaleTiles - 1>(
                          scales + S::kARowBytes, b.scales, tile.b_scale_row, k_block,
                          scale_tiles_of_row, barrier, own);
                  });
}

// Issues the MMAs, by one thread (of the first CTA of a pair), for the blocks of 32 elements along
// K that belong to the group.
template <typename S, typename Tiles>
__device__ __forceinline__ void multiply_groups(const Shared<S>& shared, uint32 tensor_base,
                                                Tiles tiles) {
    const uint32 in_tensor = tensor_base + S::kFirstSideColumn;
    const uint32 data = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    const uint32 scales = static_cast<uint32>(__cvta_generic_to_shared(shared.side));
    multiply(shared, tensor_base, tiles, OfTile{},
             [&](uint32 target, const GroupedTile& tile, int32 k_block, uint32 stage) {
        scales_to_tensor_memory<S>(in_tensor, scales + stage * S::kSideBytes);
        const uint32 a_data = data + stage * S::kOperandBytes;
        const uint32 b_data = a_data + S::kABytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int32 k = k_block * kStageRowBytes + step * kStepBytes;
            if (k >= tile.first_k && k < tile.end_k) {
                multiply_step<S>(target, a_data, b_data, in_tensor, step, k > tile.first_k);
            }
        }
    });
}

// Stores zeros in the result's rows among the 32 from `row` on, by a warp.
template <int kColumns, typename Element>
__device__ __forceinline__ void store_zeros(const TileResult<Element>& result, int32 row,
                                            int32 column) {
    const int32 end_row = min(row + 32, result.rows);
    const int32 end_column = min(column + kColumns, result.columns);
    for (; row < end_row; ++row) {
        Element* of_row = result.data + static_cast<int64>(row) * result.columns;
        for (int32 c = column + static_cast<int32>(threadIdx.x % 32); c < end_column; c += 32) {
            of_row[c] = Element();
        }
    }
}

// Epilogue warps. `result_of(tile)` is the destination of a tile's rows, which ends with the
// group's last row. Groups begin at multiples of 32, so the rows of a warp belong to one group.
template <typename S, typename Tiles, typename ResultOf>
__device__ __forceinline__ void store_groups(const Shared<S>& shared, uint32 tensor_base,
                                             Tiles tiles, ResultOf result_of) {
    const uint32 quarter = threadIdx.x / 32 - kFirstEpilogueWarp;
    const uint32 own_row = rank_in_pair<S>() * kBlockM + quarter * 32;
    const auto is_own = [&](const GroupedTile& tile) {
        const int32 row = tile.place.row + own_row;
        return row >= tile.first_row && row < tile.end_row;
    };
    // Tiles without K-blocks have no accumulator: their results are zeros.
    Tiles all = tiles;
    for (GroupedTile tile; all.next(tile);) {
        const auto result = result_of(tile);
        if (!tile.is_multiplied() && is_own(tile) && !result.accumulate) {
            store_zeros<S::kTileN>(result, tile.place.row + own_row, tile.place.column);
        }
    }
    take_tensor_tiles(
        shared, tensor_base, MultipliedTiles<Tiles>{tiles},
        [&](const GroupedTile& tile, uint32 own_row, uint32 address, bool backwards,
            uint8* staged, auto release) {
            if (!is_own(tile)) {
                // redundant tcgen05.fence::before_thread_sync, bar.warp.sync: the warp has read
                // nothing
                // redundant scope of mbarrier.arrive: the same
                release();
                return;
            }
            const auto result = result_of(tile);
            constexpr int kSubtiles = S::kTileN * sizeof(*result.data) / 128;
            store_tensor_tile<S::kTileN, kReleasedSubtiles<S, kSubtiles>>(
                result, tile.place.row + own_row, tile.place.column, address, backwards, staged,
                release);
        });
}

// `k`: elements of a row of the operands. `memory` is all of the dynamic shared memory.
template <typename S, typename Tiles, typename ResultOf>
__device__ __forceinline__ void grouped_gemm(const Operand& a, const Operand& b, int32 k,
                                             Tiles tiles, uint8* memory, ResultOf result_of) {
    const Shared<S> shared(memory);
    const uint32 tensor_base = begin(shared);
    const uint32 warp = threadIdx.x / 32;
    if (warp == kProducerWarp) {
        if (elect_one()) {
            copy_groups(shared, a, b, MultipliedTiles<Tiles>{tiles}, k);
        }
    } else if (warp == kMmaWarp) {
        if (rank_in_pair<S>() == 0 && elect_one()) {
            multiply_groups(shared, tensor_base, MultipliedTiles<Tiles>{tiles});
        }
    } else if (warp >= kFirstEpilogueWarp) {
        store_groups(shared, tensor_base, tiles, result_of);
    }
    end<S>(tensor_base);
}

}  // namespace sm100_grouped
