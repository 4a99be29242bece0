// Common parts of GEMMs on wgmma: warp specialization over the tiles of a scheduler.
//
// A CTA has three warpgroups. In the first, the producer, one thread issues copies of both operands
// into the pipeline stages, 128 bytes along K each. The other two, the consumers, each compute 64
// of every 128 rows of the tile, the rows of one wgmma; 128 rows are a wave.
//
// CTAs of a cluster share rows of an operand. A stage is then empty when the consumers of all CTAs
// have read it. Tiles beyond the result take part with zeros.
//
// A shape S defines kWaves (1 or 2), kMayBeOneWave (a tile may have one wave of two), kTileN
// (columns), kClusterCtas, kStages, kOperandBytes and kScaleBytes per stage, kHasFactors (whether a
// warp converts scales to factors), kStagedWarpBytes (staging of a warp's results) and kStoresEarly
// (all waves except the last are stored before the tile's last wgmma end).
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/register_count.cuh"

// For lambdas that take sums: arguments of a call that is not inlined are in local memory.
#define ALWAYS_INLINE __attribute__((always_inline))

namespace sm90_tile {

constexpr int kWarpgroup = 128;  // threads
constexpr int kConsumers = 2;    // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroup / 32;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Registers per thread. The sum over all warpgroups is at most the CTA's initial allocation.
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;

constexpr int kConsumerM = 64;  // rows of a wave per consumer
constexpr int kWaveM = kConsumers * kConsumerM;
constexpr int kTileN = 128;     // default of a shape
constexpr int kRowBytes = 128;  // of an operand in a stage: one swizzle

constexpr int kSharedLimit = 227 * 1024;
constexpr int kAlignment = 1024;
constexpr int kBarrierBytes = 256;
constexpr int kStagedSubtileBytes = 16 * 128;  // results that a warp stores itself

// Shared memory for stages, given the staging bytes per consumer warp.
constexpr int bytes_for_stages(int staged_warp_bytes) {
    return kSharedLimit - kAlignment - kConsumerWarps * staged_warp_bytes - kBarrierBytes;
}

// A tile of a result, and its part of the operands.
struct TileWork {
    TilePlace place;     // of the result; `row` also of a
    int32 end;           // one past the tile's last row
    int32 group;         // of grouped GEMMs
    uint32 b_row;        // first row of b, if matrices are stacked
    uint32 b_scale_row;  // first row of scale tiles of b, if quantized
    int32 first_k;       // first element along K of the operands
    int32 stages;
    int32 last_steps;    // steps of wgmma in the last stage, which may have fewer
    int32 waves;         // waves that have rows of the result
};

// Shared memory from a 1024-byte boundary on, at the same offsets in all CTAs of a cluster.
template <typename S>
struct Shared {
    uint8* operands;  // [kStages][kOperandBytes]
    uint8* staged;    // [kConsumerWarps][kStagedWarpBytes] staging of results
    uint8* scales;    // [kStages][kScaleBytes]
    uint64* full;     // [kStages] operands and scales have arrived
    uint64* empty;    // [kStages] the stage has been read by the consumers of all CTAs
    uint64* ready;    // [kStages] the factors have been written

    // Offsets in bytes from `operands`.
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

// Index of a pipeline stage, and the phase of its barriers.
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

// `barrier` is a shared address.
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

// Whether a wait has already ended. Always false in clusters, where each poll would need a fence of
// its own.
template <typename S>
__device__ __forceinline__ bool is_over(uint32 barrier, uint32 phase) {
    return S::kClusterCtas == 1 && mbarrier_is_over(barrier, phase);
}

// Barrier of all threads of all CTAs of the cluster.
template <typename S>
__device__ __forceinline__ void synchronize_all() {
    if constexpr (S::kClusterCtas == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

// Releases a stage that only wgmma have read, to the producers of all CTAs of the cluster. Called
// by each consumer warp, after all its lanes have waited for the wgmma.
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

// Releases a stage that lanes have read, too.
template <typename S>
__device__ __forceinline__ void release(uint32 empty) {
    __syncwarp();
    release_read<S>(empty);
}

// Producer: `copy(work, i, stage, full)` announces and issues the copies of the i-th K-block of a
// tile into stage `stage`.
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

// Consumer: `multiply_waves(work, stage, sums, store_wave)` accumulates the stages of a tile for as
// many waves as `sums` has. `store(work, row, sums)` stores the warp's 16 rows of a wave, from row
// `row` of the tile on. With `kStoresEarly`, `multiply_waves` has stored all waves except the last
// when it returns, if there are any stages.
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

// Runs the roles of all threads: `produce()` by one thread, `prepare()` by the second warp of its
// warpgroup, and `consume(consumer, staged)` by both consumers, with `kStagedWarpBytes` per warp.
template <typename S, typename Produce, typename Prepare, typename Consume>
__device__ __forceinline__ void run_roles(const Shared<S>& shared, Produce produce,
                                          Prepare prepare, Consume consume) {
    // Uniform over the warp, so that the compiler knows it.
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
    // A CTA must not exit while other CTAs of its cluster copy to it or arrive at its barriers.
    if constexpr (S::kClusterCtas > 1) {
        // redundant bar.warp.sync: the aligned barrier that follows waits for all lanes of a warp
        __syncwarp();
        synchronize_all<S>();
    }
}

}  // namespace sm90_tile
