// Warp roles of a BF16 GEMM on tcgen05, for any epilogue: see mma/sm100_tile.cuh.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "mma/sm100_bf16_tile.cuh"
#include "ptx/elect.cuh"
#include "scheduler/tile_scheduler.cuh"

// a b [rows, columns], with `k` elements along K: the epilogue warps call `store(shared,
// tensor_base, tiles)`. `memory` is all of the dynamic shared memory.
template <typename S, typename Store>
__device__ __forceinline__ void bf16_gemm(const TensorMap& a, const TensorMap& b, int32 rows,
                                             int32 columns, int32 k, uint8* memory,
                                             Store store) {
    using namespace sm100_bf16;
    const Shared<S> shared(memory);
    const uint32 tensor_base = begin(shared);
    const uint32 warp = threadIdx.x / 32;
    const int32 k_blocks = (k + kBlockK - 1) / kBlockK;
    const TileScheduler<S> tiles(rows, columns);

    if (warp == kProducerWarp) {
        if (elect_one()) {
            copy_elements(shared, a, b, tiles, k_blocks);
        }
    } else if (warp == kMmaWarp) {
        if (rank_in_pair<S>() == 0 && elect_one()) {
            multiply_elements(shared, tensor_base, tiles, k_blocks);
        }
    } else if (warp >= kFirstEpilogueWarp) {
        store(shared, tensor_base, tiles);
    }
    end<S>(tensor_base);
}
