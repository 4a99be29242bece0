// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands whose scales are for 128
// elements along K: E4M3, and E8M0 scales in tiles (layout/scale_tile.cuh). All three GEMMs of a
// linear layer have this form.
//
// Static persistent: a CTA computes tile after tile in an order that keeps operands in the L2
// cache; of a tile whose K is shared out, each CTA of a cluster a part. Warp specialized, see
// mma/sm90_mxfp8_tile.cuh. What lies outside of the operands reads as zeros. K is a multiple of 16, as tensor copies need, and nothing is empty. Sums run over K, or over
// parts of it and then over these, in ascending order whatever the grid.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_cluster_sum.cuh"
#include "epilogue/sm90_store_tile.cuh"
#include "mma/sm90_mxfp8_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/register_count.cuh"
#include "scheduler/persistent_tiles.cuh"

using namespace sm90_mxfp8;

constexpr uint32 kConsumersBarrier = 1;

extern __shared__ __align__(1024) uint8 memory[];

// The tiles of a GEMM, one after the other, and the blocks along K that are this CTA's.
template <typename S>
class GemmTiles {
    PersistentTiles<S::kTileM, S::kTileN, S::kDown, S::kAcross, S::kParts> tiles_;
    int32 k_begin_ = 0;
    int32 k_end_;

  public:
    static constexpr bool kMayBeEmpty = S::kParts > 1;

    __device__ __forceinline__ GemmTiles(int32 m, int32 n, int32 k_blocks)
        : tiles_(m, n), k_end_(k_blocks) {
        if constexpr (S::kParts > 1) {
            const int32 blocks = (k_blocks + S::kParts - 1) / S::kParts;
            k_begin_ = min(static_cast<int32>(cluster_rank()) * blocks, k_blocks);
            k_end_ = min(k_begin_ + blocks, k_blocks);
        }
    }

    // Where the tile is that `next` gave last.
    __device__ __forceinline__ TilePlace place() const { return tiles_.place(); }

    __device__ __forceinline__ bool next(TileWork& work) {
        const bool is_there = tiles_.next(work.place);
        work.group = 0;
        work.a_row = work.place.row;
        work.b_row = work.place.column;
        work.a_scale_row = work.a_row / kScaleTileRows;
        work.b_scale_row = work.b_row / kScaleTileRows;
        work.k_begin = k_begin_;
        work.k_end = k_end_;
        return is_there;
    }
};

// The sums of a part of K into shared memory, where operands were.
template <typename S>
__device__ __forceinline__ void put_sums(const Shared<S>& shared, uint32 consumer,
                                         const Sums<S>& sums) {
    constexpr int kColumns = S::kTileN;
    static_assert(S::kTileM * kSummedRow<kColumns> * 4 <= S::kStages * S::kOperandBytes, "room");
    barrier_sync(kConsumersBarrier, kConsumers * kWarpgroup);
    float* target = reinterpret_cast<float*>(shared.operands) +
                    first_row_of_warp(consumer) * kSummedRow<kColumns>;
#pragma unroll
    for (int slice = 0; slice < kColumns / kSliceN; ++slice) {
        put_summed_rows<kColumns>(target + slice * kSliceN, sums[slice]);
    }
}

template <typename S, typename Element>
__device__ __forceinline__ void gemm(const Operand& a, const Operand& b,
                                     const TileResult<Element>& result, int32 k) {
    const Shared<S> shared(memory);
    // The same in all lanes, as the compiler shall know.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0 && elect_one()) {
        shared.init_barriers();
    }
    synchronize_all<S>();
    const int32 k_blocks = (k + kStageK - 1) / kStageK;
    const GemmTiles<S> tiles(result.rows, result.columns, k_blocks);
    const uint32 consumer = warp / (kWarpgroup / 32) - 1;

    if (warp < kWarpgroup / 32) {
        keep_registers<kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            copy_operands(shared, a, b, tiles, k_blocks);
        }
        if constexpr (S::kParts > 1) {
            // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes
            __syncwarp();
            // Sums are there, and then all have read those of others.
            for (int i = 0; i < 2; ++i) {
                cluster_arrive();
                cluster_wait();
            }
        }
    } else {
        take_registers<kConsumerRegisters>();
        uint8* staged = shared.staged + (warp - kWarpgroup / 32) * kStagedWarpBytes;
        if constexpr (S::kParts == 1) {
            const uint32 row = first_row_of_warp(consumer);
            multiply(shared, consumer, tiles, [&](const TileWork& work, const Sums<S>& sums) {
#pragma unroll
                for (int slice = 0; slice < S::kTileN / kSliceN; ++slice) {
                    store_wgmma_rows(result, work.place.row + row,
                                     work.place.column + slice * kSliceN, sums[slice], staged);
                }
            });
        } else {
            TilePlace of_sums;
            multiply(shared, consumer, tiles, [&](const TileWork& work, const Sums<S>& sums) {
                of_sums = work.place;
                put_sums<S>(shared, consumer, sums);
            });
            cluster_arrive();
            cluster_wait();
            store_cluster_sum<Element, S::kTileM, S::kTileN, S::kParts>(
                result, of_sums.row, of_sums.column,
                reinterpret_cast<const float*>(shared.operands), threadIdx.x - kWarpgroup,
                kConsumers * kWarpgroup);
            cluster_arrive();
            cluster_wait();
        }
    }
    // No CTA ends while others of its cluster copy to it or arrive at its barriers.
    if constexpr (S::kCtas > 1) {
        // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
        __syncwarp();
        synchronize_all<S>();
    }
}

// a [m, k] and b [n, k] in boxes of the rows that a CTA copies, of 128 columns and swizzled by 128
// bytes; their scales in boxes of a tile, bias [n] or null, out [m, n]; `accumulate` adds to what is
// in an FP32 result. `by_column`: rows of b have scales of their own; otherwise 128 x 128 elements
// share one.
#define MXFP8_GEMM(name, m_, n_, down, across, parts, by_column, Element)                        \
    extern "C" __global__ void __cluster_dims__((down) * (across) * (parts), 1, 1)               \
        __launch_bounds__(kThreads, 1)                                                           \
        name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,    \
             const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,    \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate) {                                                       \
        gemm<TileShape<m_, n_, down, across, parts, by_column>>(                                 \
            Operand{a, a_scales}, Operand{b, b_scales},                                          \
            TileResult<Element>{out, bias, m, n, accumulate != 0}, k);                           \
    }

#define GEMMS(tile, m_, n_, down, across, parts)                                                 \
    MXFP8_GEMM(sm90_mxfp8_gemm_bf16_squares_##tile, m_, n_, down, across, parts, false, bf16)    \
    MXFP8_GEMM(sm90_mxfp8_gemm_f32_squares_##tile, m_, n_, down, across, parts, false, float)    \
    MXFP8_GEMM(sm90_mxfp8_gemm_bf16_rows_##tile, m_, n_, down, across, parts, true, bf16)        \
    MXFP8_GEMM(sm90_mxfp8_gemm_f32_rows_##tile, m_, n_, down, across, parts, true, float)

GEMMS(128x128, 128, 128, 1, 1, 1)
GEMMS(128x256, 128, 256, 1, 1, 1)

// Two CTAs, one below the other, that share rows of b.
GEMMS(128x256_2x1, 128, 256, 2, 1, 1)

// Eight CTAs that share out K: where there are few tiles.
GEMMS(128x256_k8, 128, 256, 1, 1, 8)
