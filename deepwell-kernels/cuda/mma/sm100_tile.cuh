// Common parts of GEMMs on tcgen05: tile shapes, layout of shared and tensor memory, warp roles,
// and the pipelines between them.
//
// A 1-CTA tile is 128 x kTileN. A 2-CTA tile is 256 x kTileN, 128 rows per CTA: each CTA of the
// pair copies its rows of a and half of the rows of b, and the first CTA issues the MMAs for both.
// Pairs may form clusters of kDown x kAcross tiles. Tiles side by side share rows of a, tiles one
// below another share rows of b, and each CTA multicasts a part of the shared rows. A stage is then
// empty when all tiles of the cluster have consumed it. Tiles beyond the result take part with
// zeros.
//
// Operands pass through pipeline stages, each a K-block of 128 bytes. Results pass through two
// accumulators in tensor memory: the epilogue warps read one accumulator while the MMA warp fills
// the other. If tensor memory is too small for two, the accumulators overlap in some columns in the
// middle. The epilogue reads these columns first, and the next tile waits only for them.
//   copy_operands  the producer warp: one thread of each CTA copies boxes of operands by TMA,
//                  128-byte swizzle;
//   multiply       the MMA warp: one thread (of the first CTA) issues the MMAs;
//   epilogue warps write results, see epilogue/store_tensor_tile.cuh.
// All roles visit the same tiles in the same order: `tiles.next(place)` sets the first element of
// the next tile (scheduler/tile_scheduler.cuh).
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"

namespace sm100 {

constexpr int kBlockM = 128;
constexpr int kStageRowBytes = 128;  // of a row, per stage
constexpr int kStepBytes = 32;    // of a row, per MMA
constexpr int kSteps = kStageRowBytes / kStepBytes;
constexpr int kTensorColumns = 512;
constexpr int kAccumulators = 2;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kBarrierBytes = 256;
constexpr int kAlignment = 1024;

constexpr int kProducerWarp = 0;
constexpr int kMmaWarp = 1;
constexpr int kFirstEpilogueWarp = 4;
constexpr int kEpilogueWarps = 4;
constexpr int kThreads = 32 * (kFirstEpilogueWarp + kEpilogueWarps);
constexpr int kStagedBytes = kEpilogueWarps * 32 * 128;  // staging of results
static_assert(kFirstEpilogueWarp % 4 == 0, "a warp reads the lanes of its number modulo four");

// A CTA also copies `kSideBytesOfStage` bytes per stage besides operands, and MMAs need
// `kSideColumnsOfAll` columns of tensor memory besides accumulators.
template <int kCtasOfPair, int kTileColumns, int kSideBytesOfStage = 0,
          int kSideColumnsOfAll = 0, int kTilesDown = 1, int kTilesAcross = 1>
struct TileShape {
    static constexpr int kCtas = kCtasOfPair;  // CTAs that compute a tile together
    static constexpr int kDown = kTilesDown;       // tiles of a cluster that share rows of b
    static constexpr int kAcross = kTilesAcross;   // tiles of a cluster that share rows of a
    static constexpr int kTiles = kDown * kAcross;
    static constexpr int kClusterCtas = kTiles * kCtas;
    static constexpr int kTileM = kCtas * kBlockM;
    static constexpr int kTileN = kTileColumns;
    static constexpr int kBlockN = kTileN / kCtas;  // rows of b that a CTA holds
    static constexpr int kSideBytes = kSideBytesOfStage;
    static constexpr int kSideColumns = kSideColumnsOfAll;
    // Columns between the starts of accumulators; a multiple of 16 if the accumulators overlap.
    static constexpr bool kShares = 2 * kTileN + kSideColumns > kTensorColumns;
    static constexpr int kAccumulatorStride =
        kShares ? (kTensorColumns - kSideColumns - kTileN) / 16 * 16 : kTileN;
    static constexpr int kOverlap = kTileN - kAccumulatorStride;  // columns of both accumulators
    static constexpr int kFirstSideColumn = kAccumulatorStride + kTileN;
    static constexpr int kEmptyBarriers = kShares ? 1 : kAccumulators;  // barriers
    static constexpr int kABytes = kBlockM * kStageRowBytes;
    static constexpr int kOperandBytes = kABytes + kBlockN * kStageRowBytes;  // per stage
    static constexpr int kStages = (kSharedLimit - kAlignment - kStagedBytes - kBarrierBytes) /
                                   (kOperandBytes + kSideBytes);
    static constexpr int kSharedBytes =
        kAlignment + kStages * (kOperandBytes + kSideBytes) + kStagedBytes + kBarrierBytes;

    static_assert(kCtas == 1 || kCtas == 2, "a CTA or a CTA pair");
    static_assert(kTiles == 1 || kCtas == 2, "two CTAs that share rows read what a pair does");
    static_assert(kClusterCtas <= 8, "what every device has room for");
    static_assert(kTileN % 64 == 0 && kTileN <= 256, "what tcgen05 takes, in whole boxes");
    static_assert(kFirstSideColumn + kSideColumns <= kTensorColumns,
                  "accumulators and what stands beside them fit tensor memory");
    static_assert(kOverlap <= 64, "what is shared is read first");
    static_assert(kStages >= 3 && kSharedBytes <= kSharedLimit, "shared memory");
    static_assert((2 * kStages + kAccumulators + kEmptyBarriers) * 8 + 8 <= kBarrierBytes,
                  "barriers");
};

// Shared memory from a 1024-byte boundary on, at the same offsets in all CTAs of a cluster.
template <typename S>
struct Shared {
    uint8* operands;     // [kStages][kBlockM + kBlockN][128], swizzled
    uint8* side;         // [kStages][kSideBytes]
    uint8* staged;       // [kEpilogueWarps][32][128]
    uint64* full;        // [kStages] the stage has arrived; in the first CTA of a pair
    uint64* empty;       // [kStages] the stage has been read, by all tiles of the cluster
    uint64* accumulator_full;   // [kAccumulators] the accumulator of a tile is complete
    uint64* accumulator_empty;  // [kEmptyBarriers] the accumulator, or the overlap, has been read
    uint32* tensor_base;

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        operands = memory + (-address & (kAlignment - 1));
        side = operands + S::kStages * S::kOperandBytes;
        staged = side + S::kStages * S::kSideBytes;
        full = reinterpret_cast<uint64*>(staged + kStagedBytes);
        empty = full + S::kStages;
        accumulator_full = empty + S::kStages;
        accumulator_empty = accumulator_full + kAccumulators;
        tensor_base = reinterpret_cast<uint32*>(accumulator_empty + S::kEmptyBarriers);
    }

    // By one thread of each CTA.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(full + i);
            mbarrier_set(empty + i, S::kTiles);
        }
        for (int i = 0; i < kAccumulators; ++i) {
            mbarrier_set(accumulator_full + i);
        }
        for (int i = 0; i < S::kEmptyBarriers; ++i) {
            mbarrier_set(accumulator_empty + i, kEpilogueWarps * S::kCtas);
        }
        mbarrier_publish();
    }
};

// Index of a stage in a pipeline of `kLength` stages, and the phase of its mbarriers.
template <int kLength>
struct PipelineState {
    uint32 index = 0;
    uint32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kLength) {
            index = 0;
            phase ^= 1;
        }
    }
};

template <typename S>
__device__ __forceinline__ void wait(uint64* barrier, uint32 phase) {
    if constexpr (S::kClusterCtas == 1) {
        mbarrier_wait(barrier, phase);
    } else {
        mbarrier_wait_cluster(barrier, phase);
    }
}

// Rank of the CTA within its cluster. CTAs of a pair have neighboring ranks; tiles are numbered
// down first.
template <typename S>
__device__ __forceinline__ uint32 rank_in_cluster() {
    if constexpr (S::kClusterCtas == 1) {
        return 0;
    } else {
        return cluster_rank();
    }
}

// Rank of the CTA within its pair.
template <typename S>
__device__ __forceinline__ uint32 rank_in_pair() {
    if constexpr (S::kTiles == 1) {
        return rank_in_cluster<S>();
    } else {
        return rank_in_cluster<S>() % S::kCtas;
    }
}

// Index of the CTA's tile within its cluster.
template <typename S>
__device__ __forceinline__ uint32 tile_in_cluster() {
    if constexpr (S::kTiles == 1) {
        return 0;
    } else {
        return rank_in_cluster<S>() / S::kCtas;
    }
}

// Rank, in the cluster, of the first CTA of the pair.
template <typename S>
__device__ __forceinline__ uint32 first_of_pair() {
    return tile_in_cluster<S>() * S::kCtas;
}

// Arrives at a barrier of CTA `rank` of the cluster.
template <typename S>
__device__ __forceinline__ void arrive_at(uint64* barrier, uint32 rank) {
    if constexpr (S::kClusterCtas == 1) {
        mbarrier_arrive(barrier);
    } else {
        mbarrier_arrive_cluster(cluster_address(mbarrier_address(barrier), rank));
    }
}

// Arrives at a barrier of the first CTA of the pair.
template <typename S>
__device__ __forceinline__ void arrive_at_first(uint64* barrier) {
    arrive_at<S>(barrier, first_of_pair<S>());
}

// The CTAs of a cluster (one bit per rank) that need the same rows of an operand, and the index of
// the calling CTA among them. Each CTA copies an equal share of the rows, in this order.
struct Sharers {
    uint16 ctas;
    uint32 index;
};

// Mask of `kCount` ranks from 0 on, with a stride of `kApart`.
template <int kCount, int kApart>
constexpr uint32 kRanks = kRanks<kCount - 1, kApart> << kApart | 1;
template <int kApart>
constexpr uint32 kRanks<0, kApart> = 0;

// CTAs that share rows of a: the same CTA of all tiles side by side.
template <typename S>
__device__ __forceinline__ Sharers sharers_of_a() {
    constexpr int kApart = S::kDown * S::kCtas;
    const uint32 first = rank_in_cluster<S>() % kApart;
    return Sharers{static_cast<uint16>(kRanks<S::kAcross, kApart> << first),
                   tile_in_cluster<S>() / S::kDown % S::kAcross};
}

// CTAs that share rows of b: the same CTA of all tiles one below another.
template <typename S>
__device__ __forceinline__ Sharers sharers_of_b() {
    const uint32 index = tile_in_cluster<S>() % S::kDown;
    const uint32 first = rank_in_cluster<S>() - index * S::kCtas;
    return Sharers{static_cast<uint16>(kRanks<S::kDown, S::kCtas> << first), index};
}

template <typename S>
__device__ __forceinline__ void synchronize_all() {
    if constexpr (S::kClusterCtas == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// All threads, at the start: initializes barriers and tensor memory, and returns the tensor memory
// address. The address in shared memory orders the allocation; tcgen05 fences are needed for
// asynchronous operations only.
template <typename S>
__device__ __forceinline__ uint32 begin(const Shared<S>& shared) {
    const uint32 warp = threadIdx.x / 32;
    if (warp == kProducerWarp && elect_one()) {
        shared.init_barriers();
    }
    if (warp == kMmaWarp) {
        tcgen05_allocate_all<S::kCtas>(shared.tensor_base);
    }
    synchronize_all<S>();
    return *shared.tensor_base;
}

// All threads, at the end. The epilogue warps have waited for all MMAs, and each warp for its own
// loads, so a barrier is enough before tensor memory is freed.
template <typename S>
__device__ __forceinline__ void end(uint32 tensor_base) {
    // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
    __syncwarp();
    synchronize_all<S>();
    if (threadIdx.x / 32 == kMmaWarp) {
        tcgen05_free_all<S::kCtas>(tensor_base);
    }
}

// Copies a box of a matrix to `target` in each of the `kSharers` CTAs that share it. In each pair,
// `barrier` of the first CTA counts the bytes.
template <typename S, int kSharers>
__device__ __forceinline__ void copy_box(uint8* target, const TensorMap& map, uint32 column,
                                         uint32 row, uint32 barrier, const Sharers& sharers) {
    if constexpr (S::kCtas == 1) {
        tensor_copy_2d(target, map, column, row, barrier);
    } else if constexpr (kSharers == 1) {
        tensor_copy_2d_pair(target, map, column, row, barrier);
    } else {
        tensor_copy_2d_pairs(target, map, column, row, barrier, sharers.ctas);
    }
}

// The K-blocks of a tile, at least one.
struct KBlocks {
    int32 first;
    int32 end;
};

// All tiles have the same K-blocks.
__device__ __forceinline__ KBlocks k_blocks_of(int32 k_blocks, const TilePlace&) {
    return KBlocks{0, k_blocks};
}

// Each tile has its own K-blocks.
struct OfTile {};

template <typename Tile>
__device__ __forceinline__ KBlocks k_blocks_of(OfTile, const Tile& tile) {
    return tile.k_blocks();
}

// Producer, one thread of each CTA: `copy(tile, k_block, stage, barrier)` issues the copies of a
// K-block to a stage.
template <typename S, typename Tiles, typename Count, typename Copy>
__device__ __forceinline__ void copy_operands(const Shared<S>& shared, Tiles tiles, Count k_blocks,
                                              Copy copy) {
    const uint32 rank = rank_in_pair<S>();
    PipelineState<S::kStages> state;
    // redundant release of mbarrier.arrive: in the first CTA the arriving thread itself waits
    for (typename Tiles::Tile tile; tiles.next(tile);) {
        const KBlocks blocks = k_blocks_of(k_blocks, tile);
        for (int32 k_block = blocks.first; k_block < blocks.end; ++k_block) {
            wait<S>(shared.empty + state.index, state.phase ^ 1);
            uint64* full = shared.full + state.index;
            uint32 barrier = mbarrier_address(full);
            if constexpr (S::kCtas > 1) {
                barrier = cluster_address(barrier, first_of_pair<S>());
            }
            // The first CTA announces the bytes of both CTAs.
            if (rank == 0) {
                // redundant release of mbarrier.arrive: the arrival publishes no writes of this
                // thread
                mbarrier_expect(full, S::kCtas * (S::kOperandBytes + S::kSideBytes));
            }
            copy(tile, k_block, state.index, barrier);
            state.advance();
        }
    }
    // A CTA must not exit while arrivals from other CTAs are in flight. A CTA without a cluster
    // waits for its last MMA, and commits nothing later.
    if constexpr (S::kClusterCtas > 1) {
        for (int i = 0; i < S::kStages; ++i) {
            // redundant acquire of mbarrier.wait, scope of mbarrier.wait: nothing is read after it
            wait<S>(shared.empty + state.index, state.phase ^ 1);
            state.advance();
        }
    }
}

// Arrives at `barrier` in the calling CTA, or in each of `ctas` of the cluster, when the MMAs
// issued by this thread have completed.
template <typename S>
__device__ __forceinline__ void commit(uint64* barrier, uint32 ctas) {
    if constexpr (S::kCtas == 1) {
        tcgen05_commit(barrier);
    } else {
        tcgen05_commit_pair(barrier, static_cast<uint16>(ctas));
    }
}

// MMA warp, one thread (of the first CTA of a pair): `mma(target, tile, k_block, stage)` issues the
// MMAs of a K-block into the accumulator at `target`. Accumulator i begins at column i *
// kAccumulatorStride of tensor memory. A tile waits until the accumulator of two tiles before has
// been read or, if accumulators overlap, until the overlap with the previous tile has been read.
template <typename S, typename Tiles, typename Count, typename Mma>
__device__ __forceinline__ void multiply(const Shared<S>& shared, uint32 tensor_base, Tiles tiles,
                                         Count k_blocks, Mma mma) {
    constexpr uint32 kPair = kRanks<S::kCtas, 1>;
    constexpr uint32 kAll = kRanks<S::kClusterCtas, 1>;
    PipelineState<S::kStages> state;
    PipelineState<kAccumulators> accumulators;
    PipelineState<S::kEmptyBarriers> empties;
    // redundant scope of mbarrier.wait, scope of mbarrier.arrive: of one pair the first CTA asks
    for (typename Tiles::Tile tile; tiles.next(tile);) {
        const KBlocks blocks = k_blocks_of(k_blocks, tile);
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        wait<S>(shared.accumulator_empty + empties.index, empties.phase ^ 1);
        tcgen05_fence_after_barrier();
        const uint32 target = tensor_base + accumulators.index * S::kAccumulatorStride;
        for (int32 k_block = blocks.first; k_block < blocks.end; ++k_block) {
            // Guards shared memory only: no tcgen05 operation that a fence would order.
            wait<S>(shared.full + state.index, state.phase);
            mma(target, tile, k_block, state.index);
            commit<S>(shared.empty + state.index, kAll);
            state.advance();
        }
        commit<S>(shared.accumulator_full + accumulators.index, kPair << first_of_pair<S>());
        accumulators.advance();
        empties.advance();
    }
}

}  // namespace sm100
