// The frame of GEMMs on wgmma: warp specialized, over the tiles that a scheduler gives.
//
// A CTA has three warpgroups. One thread of the first, the producer, has a part of both operands
// copied into each pipeline stage, 128 bytes along K. The other two, the consumers, have 64 of each
// 128 rows of the tile, the rows of one wgmma; 128 rows are a wave.
//
// CTAs of a cluster share rows of an operand. A stage is then free when the consumers of all have
// read it. Tiles beyond the result take part as others do, on zeros.
//
// A shape S says kWaves (1 or 2), kMayBeOneWave (a tile may have one wave of two), kTileN
// (columns), kClusterCtas, kStages, of each stage kOperandBytes and kScaleBytes, kHasFactors
// (whether a warp makes something of scales), kStagedWarpBytes (a warp's results on their way out)
// and kStoresEarly (all waves but the last are stored before the tile's last wgmma end).
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_count.cuh"

// Of lambdas that sums are handed to: sums that a call takes are in local memory.
#define ALWAYS_INLINE __attribute__((always_inline))

namespace sm90_tile {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Of a thread. All together are no more than those that a CTA starts with.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int kConsumerM = 64;  // rows of a wave that a consumer has
constexpr int kWaveM = kConsumers * kConsumerM;
constexpr int kTileN = 128;     // of a shape that says nothing else
constexpr int kRowBytes = 128;  // of an operand in a stage: one swizzle

constexpr int kSharedLimit = 227 * 1024;
constexpr int kAlignment = 1024;
constexpr int kBarrierBytes = 256;
constexpr int kStagedSubtileBytes = 16 * 128;  // results of a warp that it stores itself

// Shared memory for stages beside so many bytes for results of each warp of the consumers.
constexpr int bytes_for_stages(int staged_warp_bytes) {
    return kSharedLimit - kAlignment - kConsumerWarps * staged_warp_bytes - kBarrierBytes;
}

// A tile of a result and what is multiplied for it.
struct TileWork {
    TilePlace place;     // of the result; `row` is that of a, too
    int32 end;           // rows from here on are none of the tile's
    int32 group;         // of grouped GEMMs
    uint32 b_row;        // first row of b, where matrices lie one below the other
    uint32 b_scale_row;  // and of its scale tiles, of quantized operands
    int32 first_k;       // along K of the operands, elements
    int32 stages;
    int32 last_steps;    // of wgmma in the last stage, where it may have fewer
    int32 waves;         // that have rows of the result
};

// Shared memory from a 1024-byte boundary on, in the same places in all CTAs of a cluster.
template <typename S>
struct Shared {
    uint8* operands;  // [kStages][kOperandBytes]
    uint8* staged;    // [kConsumerWarps][kStagedWarpBytes] results on their way out
    uint8* scales;    // [kStages][kScaleBytes]
    uint64* full;     // [kStages] operands and scales are there
    uint64* empty;    // [kStages] they have been read, by the consumers of all CTAs of the cluster
    uint64* ready;    // [kStages] what a warp made of the scales is there

    // Where they begin, in bytes from `operands` on.
    static constexpr uint32 kStagedAt = S::kStages * S::kOperandBytes;
    static constexpr uint32 kScalesAt = kStagedAt + kConsumerWarps * S::kStagedWarpBytes;
    static constexpr uint32 kFullAt = kScalesAt + S::kStages * S::kScaleBytes;
    static constexpr uint32 kEmptyAt = kFullAt + S::kStages * 8;
    static constexpr uint32 kReadyAt = kEmptyAt + S::kStages * 8;
    static_assert(3 * S::kStages * 8 <= kBarrierBytes, "shared memory");

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        operands = memory + (-address & (kAlignment - 1));
        staged = operands + kStagedAt;
        scales = operands + kScalesAt;
        full = reinterpret_cast<uint64*>(operands + kFullAt);
        empty = reinterpret_cast<uint64*>(operands + kEmptyAt);
        ready = reinterpret_cast<uint64*>(operands + kReadyAt);
    }

    // By one thread of each CTA.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_set(full + i);
            mbarrier_set(empty + i, kConsumerWarps * S::kClusterCtas);
            if constexpr (S::kHasFactors) {
                mbarrier_set(ready + i);
            }
        }
        mbarrier_publish();
    }
};

// A pipeline stage and the phase of its barriers.
template <typename S>
struct Stage {
    uint32 index = 0;
    uint32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == S::kStages) {
            index = 0;
            phase ^= 1;
        }
    }
};

// Barriers are named by their shared addresses.
template <typename S>
__device__ __forceinline__ void wait(uint32 barrier, uint32 phase) {
    if constexpr (S::kClusterCtas == 1) {
        mbarrier_wait(barrier, phase);
    } else {
        mbarrier_wait_cluster_shared(barrier, phase);
    }
}

template <typename S>
__device__ __forceinline__ void wait(uint64* barrier, uint32 phase) {
    wait<S>(mbarrier_address(barrier), phase);
}

// Whether a wait is seen to be over already. In clusters, where a look needs a fence of its own, it
// never is.
template <typename S>
__device__ __forceinline__ bool is_over(uint32 barrier, uint32 phase) {
    return S::kClusterCtas == 1 && mbarrier_is_over(barrier, phase);
}

// All threads of all CTAs of the cluster.
template <typename S>
__device__ __forceinline__ void synchronize_all() {
    if constexpr (S::kClusterCtas == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// Gives a stage back that only wgmma have read, by each warp of the consumers, which waited for
// them as one: to the producers of the cluster.
template <typename S>
__device__ __forceinline__ void release_read(uint32 empty) {
    const uint32 lane = threadIdx.x % 32;
    if constexpr (S::kClusterCtas == 1) {
        if (lane == 0) {
            mbarrier_arrive(empty);
        }
    } else if (lane < S::kClusterCtas) {
        mbarrier_arrive_cluster_shared(cluster_address(empty, lane));
    }
}

template <typename S>
__device__ __forceinline__ void release_read(uint64* empty) {
    release_read<S>(mbarrier_address(empty));
}

// The same of a stage that lanes have read, too.
template <typename S>
__device__ __forceinline__ void release(uint32 empty) {
    __syncwarp();
    release_read<S>(empty);
}

// The producer: `copy(work, i, stage, full)` announces and starts what comes into stage number
// `stage` as the i-th of a tile.
template <typename S, typename Tiles, typename Copy>
__device__ __forceinline__ void copy_tiles(const Shared<S>& shared, Tiles tiles, Copy copy) {
    Stage<S> stage;
    for (TileWork work; tiles.next(work);) {
        for (int32 i = 0; i < work.stages; ++i) {
            wait<S>(shared.empty + stage.index, stage.phase ^ 1);
            copy(work, i, stage.index, shared.full + stage.index);
            stage.advance();
        }
    }
}

// A consumer: `multiply_waves(work, stage, sums, store_wave)` adds up the stages of as many waves
// of a tile as there are `sums`; `store(work, row, sums)` takes those of its warp's 16 rows of a
// wave, the first of which is `row` of the tile. Where stores are early, `multiply_waves` has
// stored all waves but the last when it returns, if there are stages.
template <int kWaves, typename S, typename Multiply, typename Store>
__device__ __forceinline__ void multiply_tile(uint32 consumer, const TileWork& work,
                                              Stage<S>& stage, Multiply multiply_waves,
                                              Store store) {
    const uint32 warp_row = consumer * kConsumerM + threadIdx.x % kWarpgroup / 32 * 16;
    float sums[kWaves][S::kTileN / 2] = {};
    const auto store_wave = [&](int wave) ALWAYS_INLINE {
        store(work, wave * kWaveM + warp_row, sums[wave]);
    };
    multiply_waves(work, stage, sums, store_wave);
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
        const bool is_stored = S::kStoresEarly && wave + 1 < kWaves && work.stages > 0;
        if (!is_stored) {
            store_wave(wave);
        }
    }
}

template <typename S, typename Tiles, typename Multiply, typename Store>
__device__ __forceinline__ void multiply_tiles(uint32 consumer, Tiles tiles,
                                               Multiply multiply_waves, Store store) {
    Stage<S> stage;
    for (TileWork work; tiles.next(work);) {
        if (S::kMayBeOneWave && work.waves == 1) {
            multiply_tile<1, S>(consumer, work, stage, multiply_waves, store);
        } else {
            multiply_tile<S::kWaves, S>(consumer, work, stage, multiply_waves, store);
        }
    }
}

// The roles of all threads: `produce()` by one thread, `prepare()` by a warp beside it, and
// `consume(consumer, staged)` by each of the consumers with `kStagedWarpBytes` for a warp.
template <typename S, typename Produce, typename Prepare, typename Consume>
__device__ __forceinline__ void run_roles(const Shared<S>& shared, Produce produce,
                                          Prepare prepare, Consume consume) {
    // The same in all lanes, as the compiler shall know.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0 && elect_one()) {
        shared.init_barriers();
    }
    // redundant release of barrier.cluster.arrive: a fence of its own publishes the barriers
    synchronize_all<S>();
    if (warp < kWarpgroup / 32) {
        keep_registers<kProducerRegisters>();
        if (warp == 0 && elect_one()) {
            produce();
        }
        if (warp == 1) {
            prepare();
        }
    } else {
        take_registers<kConsumerRegisters>();
        uint8* staged = shared.staged + (warp - kWarpgroup / 32) * S::kStagedWarpBytes;
        consume(warp / (kWarpgroup / 32) - 1, staged);
    }
    // No CTA ends while others of its cluster copy to it or arrive at its barriers.
    if constexpr (S::kClusterCtas > 1) {
        // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
        __syncwarp();
        synchronize_all<S>();
    }
}

}  // namespace sm90_tile
