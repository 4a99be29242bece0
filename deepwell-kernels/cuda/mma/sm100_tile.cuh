// What GEMMs on tcgen05 share: the shape of a tile, the layout of shared and tensor memory, the
// roles of warps, and the pipelines between them.
//
// A 1-CTA tile is 128 x kTileN, a 2-CTA tile 256 x kTileN of which each CTA holds 128 rows. Each
// CTA of a pair copies its rows of a and half of the rows of b, and the first one issues the MMAs
// for both. Pairs may form clusters of kDown x kAcross tiles. Tiles side by side share rows of a,
// tiles one below the other rows of b, and each CTA multicasts a part of what it shares. A stage is
// then empty when all tiles of the cluster have consumed it. Tiles beyond the result take part on
// zeros. Operands pass through pipeline stages, each a K-block of 128 bytes. Results pass through
// two accumulators in tensor memory: the epilogue warps read one while the MMA warp fills the
// other. Where there is no room for two, they share some columns in the middle, which the epilogue
// reads first; the next tile waits for those only.
//   copy_operands  the producer warp: one thread of each CTA copies boxes of operands by TMA,
//                  swizzled by 128 bytes;
//   multiply       the MMA warp: one thread (of the first CTA) issues the MMAs;
//   epilogue warps write results, see epilogue/store_tensor_tile.cuh.
// Each visits the same tiles in the same order: `tiles.next(place)` gives the first element of the
// next one (scheduler/tile_scheduler.cuh).
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
constexpr int kStageRowBytes = 128;  // of a row, in a stage
constexpr int kStepBytes = 32;    // of a row, in one MMA
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
constexpr int kStagedBytes = kEpilogueWarps * 32 * 128;  // results on their way out
static_assert(kFirstEpilogueWarp % 4 == 0, "a warp reads the lanes of its number modulo four");

// Beside operands, `kSideBytesOfStage` of a stage are copied by each CTA, and beside accumulators
// MMAs need `kSideColumnsOfAll` columns of tensor memory.
template <int kCtasOfPair, int kTileColumns, int kSideBytesOfStage = 0,
          int kSideColumnsOfAll = 0, int kTilesDown = 1, int kTilesAcross = 1>
struct TileShape {
    static constexpr int kCtas = kCtasOfPair;  // that compute a tile together
    static constexpr int kDown = kTilesDown;       // tiles of a cluster, which share rows of b
    static constexpr int kAcross = kTilesAcross;   // and those that share rows of a
    static constexpr int kTiles = kDown * kAcross;
    static constexpr int kClusterCtas = kTiles * kCtas;
    static constexpr int kTileM = kCtas * kBlockM;
    static constexpr int kTileN = kTileColumns;
    static constexpr int kBlockN = kTileN / kCtas;  // rows of b that a CTA holds
    static constexpr int kSideBytes = kSideBytesOfStage;
    static constexpr int kSideColumns = kSideColumnsOfAll;
    // Columns from one accumulator to the other, in sixteens where they share some.
    static constexpr bool kShares = 2 * kTileN + kSideColumns > kTensorColumns;
    static constexpr int kAccumulatorStride =
        kShares ? (kTensorColumns - kSideColumns - kTileN) / 16 * 16 : kTileN;
    static constexpr int kFirstSideColumn = kAccumulatorStride + kTileN;
    static constexpr int kEmptyBarriers = kShares ? 1 : kAccumulators;  // barriers
    static constexpr int kABytes = kBlockM * kStageRowBytes;
    static constexpr int kOperandBytes = kABytes + kBlockN * kStageRowBytes;  // of a stage
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
    static_assert(kTileN - kAccumulatorStride <= 32, "what is shared is read first");
    static_assert(kStages >= 3 && kSharedBytes <= kSharedLimit, "shared memory");
    static_assert((2 * kStages + kAccumulators + kEmptyBarriers) * 8 + 8 <= kBarrierBytes,
                  "barriers");
};

// Shared memory from a 1024-byte boundary on, in the same places in all CTAs of a cluster.
template <typename S>
struct Shared {
    uint8* operands;     // [kStages][kBlockM + kBlockN][128], swizzled
    uint8* side;         // [kStages][kSideBytes]
    uint8* staged;       // [kEpilogueWarps][32][128]
    uint64* full;        // [kStages] operands and the rest are there; of the first CTA of a pair
    uint64* empty;       // [kStages] the stage is read, by all tiles of the cluster
    uint64* accumulator_full;   // [kAccumulators] the sums of a tile are complete
    uint64* accumulator_empty;  // [kEmptyBarriers] they are read, or the columns that two share
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

// A stage of a pipeline of `kLength` stages, and the phase of its mbarriers.
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

// Of the CTA within its cluster. Pairs have neighboring ranks; tiles are counted down first.
template <typename S>
__device__ __forceinline__ uint32 rank_in_cluster() {
    if constexpr (S::kClusterCtas == 1) {
        return 0;
    } else {
        return cluster_rank();
    }
}

// Of the CTA within its pair.
template <typename S>
__device__ __forceinline__ uint32 rank_in_pair() {
    if constexpr (S::kTiles == 1) {
        return rank_in_cluster<S>();
    } else {
        return rank_in_cluster<S>() % S::kCtas;
    }
}

// Of the CTA's tile within its cluster.
template <typename S>
__device__ __forceinline__ uint32 tile_in_cluster() {
    if constexpr (S::kTiles == 1) {
        return 0;
    } else {
        return rank_in_cluster<S>() / S::kCtas;
    }
}

// The rank in the cluster of the first CTA of the pair.
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

// At one of the first CTA of the pair.
template <typename S>
__device__ __forceinline__ void arrive_at_first(uint64* barrier) {
    arrive_at<S>(barrier, first_of_pair<S>());
}

// CTAs of a cluster, a bit for each rank, that need the same rows of an operand, and which of
// them the calling one is. Each copies as many of the rows, in this order.
struct Sharers {
    uint16 ctas;
    uint32 index;
};

// `kCount` ranks, `kApart` from each other, from 0 on.
template <int kCount, int kApart>
constexpr uint32 kRanks = kRanks<kCount - 1, kApart> << kApart | 1;
template <int kApart>
constexpr uint32 kRanks<0, kApart> = 0;

// Of rows of a: the same CTA of all tiles side by side.
template <typename S>
__device__ __forceinline__ Sharers sharers_of_a() {
    constexpr int kApart = S::kDown * S::kCtas;
    const uint32 first = rank_in_cluster<S>() % kApart;
    return Sharers{static_cast<uint16>(kRanks<S::kAcross, kApart> << first),
                   tile_in_cluster<S>() / S::kDown % S::kAcross};
}

// Of rows of b: the same CTA of all tiles one below the other.
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

// All threads, first of all: barriers and tensor memory, whose address this gives. That it has been
// allocated is known by the address: fences of tcgen05 are for what is asynchronous.
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

// All threads, last of all. MMAs are complete for the epilogue warps and loads for those who
// loaded, so that a barrier is enough before tensor memory is given back.
template <typename S>
__device__ __forceinline__ void end(uint32 tensor_base) {
    // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
    __syncwarp();
    synchronize_all<S>();
    if (threadIdx.x / 32 == kMmaWarp) {
        tcgen05_free_all<S::kCtas>(tensor_base);
    }
}

// A box of a matrix to `target` in each of the `kSharers` CTAs that share it; `barrier`, of the
// first CTA of each one's pair, counts its bytes.
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

// The K-blocks of a tile, one at least.
struct KBlocks {
    int32 first;
    int32 end;
};

// All tiles have the same.
__device__ __forceinline__ KBlocks k_blocks_of(int32 k_blocks, const TilePlace&) {
    return KBlocks{0, k_blocks};
}

// Each tile has its own.
struct OfTile {};

template <typename Tile>
__device__ __forceinline__ KBlocks k_blocks_of(OfTile, const Tile& tile) {
    return tile.k_blocks();
}

// One thread of each CTA: `copy(tile, k_block, stage, barrier)` starts the copies of a K-block
// to a stage.
template <typename S, typename Tiles, typename Count, typename Copy>
__device__ __forceinline__ void copy_operands(const Shared<S>& shared, Tiles tiles, Count k_blocks,
                                              Copy copy) {
    const uint32 rank = rank_in_pair<S>();
    PipelineState<S::kStages> state;
    // redundant release of mbarrier.arrive: in the first CTA it is the one that waits for it
    for (typename Tiles::Tile tile; tiles.next(tile);) {
        const KBlocks blocks = k_blocks_of(k_blocks, tile);
        for (int32 k_block = blocks.first; k_block < blocks.end; ++k_block) {
            wait<S>(shared.empty + state.index, state.phase ^ 1);
            uint64* full = shared.full + state.index;
            uint32 barrier = mbarrier_address(full);
            if constexpr (S::kCtas > 1) {
                barrier = cluster_address(barrier, first_of_pair<S>());
            }
            // The first CTA announces what both get.
            if (rank == 0) {
                // redundant release of mbarrier.arrive: it hands on nothing of this thread
                mbarrier_expect(full, S::kCtas * (S::kOperandBytes + S::kSideBytes));
            }
            copy(tile, k_block, state.index, barrier);
            state.advance();
        }
    }
    // No CTA ends while arrivals of others are on their way. A CTA alone waits for its last
    // MMA, after which it commits nothing.
    if constexpr (S::kClusterCtas > 1) {
        for (int i = 0; i < S::kStages; ++i) {
            // redundant acquire of mbarrier.wait, scope of mbarrier.wait: nothing is read after it
            wait<S>(shared.empty + state.index, state.phase ^ 1);
            state.advance();
        }
    }
}

// `barrier` of the calling CTA, or of each of `ctas` of the cluster, gets an arrival when the
// MMAs that this thread issued are there.
template <typename S>
__device__ __forceinline__ void commit(uint64* barrier, uint32 ctas) {
    if constexpr (S::kCtas == 1) {
        tcgen05_commit(barrier);
    } else {
        tcgen05_commit_pair(barrier, static_cast<uint16>(ctas));
    }
}

// One thread (of the first CTA of a pair): `mma(target, tile, k_block, stage)` issues the MMAs of a
// K-block, onto the accumulator at `target`. Accumulator i begins at column i * kAccumulatorStride
// of tensor memory. A tile waits until the one before the last is read or, where accumulators share
// columns, until those of the last one are.
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
            // What it waits for is in shared memory: nothing of tcgen05 that a fence would order.
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
