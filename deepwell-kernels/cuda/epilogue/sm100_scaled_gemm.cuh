// Warp roles of a GEMM of block-scaled operands on tcgen05, for any epilogue; mma/sm100_tile.cuh.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "mma/sm100_scaled_tile.cuh"
#include "ptx/elect.cuh"
#include "scheduler/tile_scheduler.cuh"

// a b^T [rows, columns], with `k` elements along K: the epilogue warps call `store(shared,
// tensor_base, tiles)`. `memory` is all of the dynamic shared memory.
template <typename S, typename Store>
__device__ __forceinline__ void scaled_gemm(const sm100_scaled::Operand& a,
                                            const sm100_scaled::Operand& b, int32 k,
                                            uint8* memory, Store store) {
    using namespace sm100_scaled;
    const Shared<S> shared(memory);
    const uint32 tensor_base = begin(shared);
    const uint32 warp = threadIdx.x / 32;
    const uint32 rank = rank_in_pair<S>();
    const int32 k_blocks = (k + S::Format::kStageK - 1) / S::Format::kStageK;
    const TileScheduler<S> tiles(a.rows, b.rows);

    if (warp == kProducerWarp) {
        if (elect_one()) {
            copy_quantized(shared, a, b, tiles, k_blocks);
        }
    } else if (warp == kMmaWarp) {
        if (rank == 0 && elect_one()) {
            multiply_quantized(shared, tensor_base, tiles, k_blocks);
        }
    } else if (warp >= kFirstEpilogueWarp) {
        store(shared, tensor_base, tiles);
    }
    end<S>(tensor_base);
}
