// Common parts of the kernels of sm90_attention_backward.cu: sizes, shared memory, copies of rows
// to shared memory and of results to global memory.
//
// A CTA has one producer and two consumer warpgroups. It processes tiles of 128 rows of two
// matrices, 64 rows per consumer, and streams rows of two other matrices past each tile.
#pragma once

#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_part_rows.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/release.cuh"
#include "ptx/tensor_copy_4d.cuh"

namespace sm90_attention {

constexpr int kConsumers = 2;
constexpr int kTileRows = kConsumers * kWaveM;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Registers per thread. The sum over all warpgroups is at most the CTA's initial allocation.
constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;
// The statistics of a sequence are padded to whole tiles.
constexpr int kStatisticsRows = 128;

// Statistics of rows of scores, [batch * heads, seq padded]: lse in powers of two, and delta.
// Beyond the sequence lse is infinite, so that weights are zero.
struct Statistics {
    float* lse_log2;
    float* delta;
};

struct Sizes {
    uint32* counters;  // tiles taken, CTAs done; zero before and after
    int32 queries;     // of a sequence
    int32 keys;        // of a sequence; other than the queries only for parts
    uint32 heads;
    uint32 kv_heads;
    uint32 batch;
    uint32 section_heads;  // of key heads, or of query heads; see scheduler/attention_order.cuh
    uint32 causal;
    float scale;
    float scale_log2;  // scale * log2(e), positive

    __device__ __forceinline__ uint32 query_tiles() const {
        return (queries + kTileRows - 1) / kTileRows;
    }

    __device__ __forceinline__ uint32 key_tiles() const {
        return (keys + kTileRows - 1) / kTileRows;
    }

    // Padded rows of a sequence's statistics.
    __device__ __forceinline__ uint32 padded_seq() const {
        return (queries + kStatisticsRows - 1) / kStatisticsRows * kStatisticsRows;
    }
};

// Tensor maps of matrices [batch, rows, heads, D], in boxes of 64 elements of a head. Kernels for
// parts have no maps of results.
struct Maps {
    const TensorMap& dout;
    const TensorMap& q;
    const TensorMap& k;
    const TensorMap& v;
    const TensorMap& first;   // dk or dq
    const TensorMap& second;  // dv
    PartRows first_rows = {};
    PartRows second_rows = {};
};

// Copies all columns of some rows of a head, from row `row` on.
template <typename Rows>
__device__ __forceinline__ void copy_rows(uint8* target, const TensorMap& map, int32 row,
                                          uint32 head, uint32 batch, uint64* full) {
#pragma unroll
    for (uint32 chunk = 0; chunk < Rows::kChunks; ++chunk) {
        const TensorPlace place{{chunk * kChunkColumns, head, static_cast<uint32>(row), batch}};
        tensor_copy_4d(target + chunk * Rows::kChunkBytes, map, place, full);
    }
}

// Stores 64 rows of a head, written to shared memory by `stage_rows`.
template <typename Rows>
__device__ __forceinline__ void store_rows(const TensorMap& map, const uint8* staged, int32 row,
                                           uint32 head, uint32 batch) {
#pragma unroll
    for (uint32 chunk = 0; chunk < Rows::kChunks; ++chunk) {
        const TensorPlace place{{chunk * kChunkColumns, head, static_cast<uint32>(row), batch}};
        tensor_store_4d(map, place, staged + chunk * Rows::kChunkBytes);
    }
}

// The last CTA resets the counters.
__device__ __forceinline__ void end_counting(uint32* counters) {
    if (add_acquire_release(counters + 1, 1) == gridDim.x - 1) {
        counters[0] = 0;
        counters[1] = 0;
    }
}

// Shared memory from a 1024-byte boundary on: tiles of two matrices, stages of two others and of
// statistics, barriers. `Own` describes rows of a tile, `Streamed` rows of a stage.
template <typename OwnRows, typename StreamedRows, int kSlotCount, int kStageCount,
          int kStatisticsOfStage>
struct Layout {
    using Own = OwnRows;
    using Streamed = StreamedRows;
    static constexpr int kSlots = kSlotCount;
    static constexpr int kStages = kStageCount;
    static constexpr int kStatistics = kStatisticsOfStage;  // of lse and delta each
    static constexpr int kBarriers = 2 * kSlots + 4 * kStages;
    static constexpr int kSharedBytes = 1024 + 2 * kSlots * Own::kBytes +
                                        2 * kStages * Streamed::kBytes +
                                        2 * kStages * kStatistics * 4 + 256;
    static_assert(kSharedBytes <= 227 * 1024, "what a CTA may have");
    static_assert(kBarriers * 8 + kSlots * 4 <= 256, "room for barriers and numbers of tiles");

    uint8* own[2];       // [kSlots] each
    uint8* streamed[2];  // [kStages] each
    float* lse_log2;     // [kStages][kStatistics]
    float* delta;        // [kStages][kStatistics]
    uint64* own_full;
    uint64* own_empty;
    uint64* full[2];
    uint64* empty[2];
    volatile uint32* tiles;  // [kSlots] tile indices

    __device__ __forceinline__ explicit Layout(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        own[0] = memory + (-address & 1023);
        own[1] = own[0] + kSlots * Own::kBytes;
        streamed[0] = own[1] + kSlots * Own::kBytes;
        streamed[1] = streamed[0] + kStages * Streamed::kBytes;
        lse_log2 = reinterpret_cast<float*>(streamed[1] + kStages * Streamed::kBytes);
        delta = lse_log2 + kStages * kStatistics;
        own_full = reinterpret_cast<uint64*>(delta + kStages * kStatistics);
        own_empty = own_full + kSlots;
        full[0] = own_empty + kSlots;
        full[1] = full[0] + kStages;
        empty[0] = full[1] + kStages;
        empty[1] = empty[0] + kStages;
        tiles = reinterpret_cast<uint32*>(empty[1] + kStages);
    }

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < kSlots; ++i) {
            mbarrier_set(own_full + i);
            mbarrier_set(own_empty + i, kConsumers);
        }
        for (int which = 0; which < 2; ++which) {
            for (int i = 0; i < kStages; ++i) {
                mbarrier_set(full[which] + i);
                mbarrier_set(empty[which] + i, kConsumers * kWarpgroup / 32);
            }
        }
        mbarrier_publish();
    }

    // Shared address of stage or slot `index` of `base`.
    static __device__ __forceinline__ uint32 address(const uint8* base, uint32 index,
                                                     uint32 bytes) {
        return static_cast<uint32>(__cvta_generic_to_shared(base)) + index * bytes;
    }
};

// Copies rows of a tile of two matrices, from row `row` on, into a slot.
template <typename Shared>
__device__ __forceinline__ void copy_tile(const Shared& shared, uint32 slot,
                                          const TensorMap& first, const TensorMap& second,
                                          int32 row, uint32 head, uint32 batch) {
    using Own = typename Shared::Own;
    uint64* full = shared.own_full + slot;
    mbarrier_expect(full, 2 * Own::kBytes);
    copy_rows<Own>(shared.own[0] + slot * Own::kBytes, first, row, head, batch, full);
    copy_rows<Own>(shared.own[1] + slot * Own::kBytes, second, row, head, batch, full);
}

// A consumer's pending stores from a slot; releases the slot once the stores have read it.
class Leaving {
    uint64* empty_ = nullptr;

  public:
    // By one thread: `empty` is the barrier to release when all stores have read shared memory.
    __device__ __forceinline__ void set(uint64* empty) {
        tensor_store_commit();
        empty_ = empty;
    }

    __device__ __forceinline__ void finish() {
        if (empty_ != nullptr) {
            tensor_store_wait_read();
            mbarrier_arrive(empty_);
            empty_ = nullptr;
        }
    }
};

// Initializes barriers for all threads; returns the warp's index.
template <typename Shared>
__device__ __forceinline__ uint32 begin_warp(const Shared& shared) {
    // Uniform over the warp, so that the compiler knows it.
    const uint32 warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    if (warp == 0 && elect_one()) {
        shared.init_barriers();
    }
    __syncthreads();
    return warp;
}

}  // namespace sm90_attention
