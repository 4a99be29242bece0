// Ordered summation of dq over CTAs in sm90_attention_backward_ordered.cu.
//
// dq is summed in FP32 in global memory, by blocks of queries. A tile of keys adds to a block when
// the number of tiles that have added to the block equals the tile's rank; the first tile stores.
// Tiles of a head have the same order of ranks for every block: the order in which they are taken
// from the tile counter. A CTA waits only for tiles taken before its own tile, so there is no
// deadlock.
//
// Causal tiles are taken shortest first, that is, from the last keys on, and each starts at the
// queries of its own keys. A CTA is then always one tile ahead of the CTA with the next tile, and
// no CTA waits. Heads from `longest_first_from` on fill the CTAs that would be idle at the end:
// their longest tiles are taken first, and each starts at the last queries.
#pragma once

#include "common/opaque.cuh"
#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/reduce.cuh"
#include "ptx/release.cuh"
#include "ptx/wgmma_bf16.cuh"
#include "scheduler/attention_order.cuh"

namespace sm90_attention {

// Sums of a block of queries over all columns of a head: 32 per thread for every head width.
constexpr int kSumsOfThread = 32;
constexpr int kSumsOfBlock = kConsumers * kWarpgroup * kSumsOfThread;

struct QuerySums {
    float* sums;     // [batch * heads, blocks, consumers, kSumsOfThread / 4, threads, 4]
    uint32* counts;  // [batch * heads, blocks] tiles of keys that have added
};

// Order of all tiles, computed by the host because the producer warps have few registers.
struct Order {
    uint32 all;    // tiles of all heads
    uint32 group;  // query heads to a key head
    uint32 longest_first_from;
};

// A tile of keys, and the blocks of queries that see any of its keys.
template <int kBlock>
struct OrderedTile {
    uint32 batch;
    uint32 kv_head;
    int32 number;  // within its head
    int32 tiles;
    int32 first_block;
    int32 blocks;  // of a sequence
    bool is_causal;
    bool is_longest_first;

    __device__ __forceinline__ OrderedTile(uint32 index, const Sizes& sizes, const Order& order) {
        const uint32 seq = opaque(sizes.keys);
        tiles = (seq + kTileRows - 1) / kTileRows;
        const HeadTileIndex place =
            head_tile_at(index, tiles, sizes.batch * sizes.kv_heads, sizes.section_heads);
        batch = place.head / sizes.kv_heads;
        kv_head = place.head - batch * sizes.kv_heads;
        is_causal = sizes.causal != 0;
        is_longest_first = place.head >= order.longest_first_from;
        number = is_longest_first ? place.tile : tiles - 1 - place.tile;
        first_block = is_causal ? number * kTileRows / kBlock : 0;
        blocks = (seq + kBlock - 1) / kBlock;
    }

    __device__ __forceinline__ int32 first_key() const {
        return number * kTileRows;
    }

    // Blocks of the tile: their number, the first to process, and the stride to the next.
    __device__ __forceinline__ int32 count() const {
        return blocks - first_block;
    }

    __device__ __forceinline__ int32 begin() const {
        return is_causal && is_longest_first ? blocks - 1 : first_block;
    }

    __device__ __forceinline__ int32 stride() const {
        return is_causal && is_longest_first ? -1 : 1;
    }

    // Number of tiles that add to `block` before this tile.
    __device__ __forceinline__ uint32 rank(int32 block) const {
        if (is_longest_first) {
            return number;
        }
        const int32 last = is_causal ? min(tiles, (block * kBlock + kBlock - 1) / kTileRows + 1)
                                     : tiles;
        return last - 1 - number;
    }
};

// Index of a block in `sums` and `counts`. A block has at least 64 rows, and rows are counted in 31
// bits, so the index leaves a bit free.
template <int kBlock>
__device__ __forceinline__ uint32 block_index(const OrderedTile<kBlock>& tile, const Sizes& sizes,
                                              uint32 head, int32 block) {
    return (tile.batch * sizes.heads + head) * tile.blocks + block;
}

// Shared memory of the kernel: stages of ds [keys, queries] of a tile and a block, written and read
// by both consumers, and the barriers of turns. The stages precede the shared memory of the frame;
// the barriers lie among the barriers of the frame.
template <typename FrameLayout, int kBlock>
struct OrderedLayout : FrameLayout {
    using Scores = WgmmaRows<kTileRows, kBlock>;
    static constexpr int kScoreStages = 2;
    static constexpr int kSharedBytes = FrameLayout::kSharedBytes + kScoreStages * Scores::kBytes;
    static_assert(kSharedBytes <= 227 * 1024, "what a CTA may have");
    // Offset of these barriers in the frame's 256 bytes of barriers.
    static constexpr int kBarriersAt = 192;
    static_assert(FrameLayout::kBarriers * 8 + FrameLayout::kSlots * 4 + 16 <= kBarriersAt,
                  "room for the barriers here, and for words before them");
    static_assert(FrameLayout::kStages <= 3, "room for words");

    uint8* scores;        // [kScoreStages]
    uint64* scores_full;  // [kScoreStages]
    uint64* scores_empty;
    uint64* turn_come;    // the CTA's turn to add to its next block
    uint64* turn_taken;   // both consumers have added
    // Values in shared memory that save registers of the consumers.
    volatile uint32* first_queries;  // [kStages] of the blocks that are loaded
    volatile uint32* turn;           // where to add: block index << 1, bit 0 set for the first tile

    __device__ __forceinline__ explicit OrderedLayout(uint8* memory)
        : FrameLayout(memory + kScoreStages * Scores::kBytes),
          scores(FrameLayout::own[0] - kScoreStages * Scores::kBytes),
          scores_full(FrameLayout::own_full + kBarriersAt / 8),
          scores_empty(scores_full + kScoreStages),
          turn_come(scores_empty + kScoreStages),
          turn_taken(turn_come + 1),
          first_queries(reinterpret_cast<uint32*>(scores_full) - 4),
          turn(first_queries + 3) {}

    // By one thread.
    __device__ __forceinline__ void init_barriers() const {
        constexpr uint32 kWarps = kConsumers * kWarpgroup / 32;
        for (int i = 0; i < kScoreStages; ++i) {
            mbarrier_set(scores_full + i, kWarps);
            mbarrier_set(scores_empty + i, kWarps);
        }
        mbarrier_set(turn_come);
        mbarrier_set(turn_taken, kWarps);
        FrameLayout::init_barriers();
    }
};

// By one thread: waits for each turn of this CTA, and ends the turn when the consumers have added.
template <typename Shared, int kBlock>
__device__ __forceinline__ void take_turns(const Shared& shared, const QuerySums& dq,
                                           const Sizes& sizes, const Order& order) {
    Stage<Shared::kSlots> slot;
    uint32 phase = 0;
    for (;;) {
        mbarrier_wait(shared.own_full + slot.index, slot.phase);
        const uint32 number = shared.tiles[slot.index];
        if (number >= order.all) {
            break;
        }
        const OrderedTile<kBlock> tile(number, sizes, order);
        for (uint32 i = 0; i < order.group; ++i) {
            int32 block = tile.begin();
            for (int32 left = tile.count(); left > 0; --left, block += tile.stride()) {
                const uint32 head = tile.kv_head * order.group + i;
                const uint32 index = block_index(tile, sizes, head, block);
                uint32* count = dq.counts + index;
                const uint32 rank = tile.rank(block);
                while (load_acquire(count) != rank) {
                }
                *shared.turn = index << 1 | (rank == 0 ? 1 : 0);
                mbarrier_arrive(shared.turn_come);
                mbarrier_wait(shared.turn_taken, phase);
                phase ^= 1;
                add_release(count, 1);
            }
        }
        slot.advance();
    }
}

// Adds this consumer's sums at the CTA's turn; `phase` is the phase of the turn barrier.
template <typename Shared>
__device__ __forceinline__ void add_in_turn(const Shared& shared,
                                            const float (&sums)[kSumsOfThread], float* all,
                                            uint32 phase) {
    mbarrier_wait(shared.turn_come, phase);
    const uint32 turn = *shared.turn;
    const uint32 thread = opaque(threadIdx.x) - kWarpgroup;  // of the consumers
    float* target = all + static_cast<uint64>(turn >> 1) * kSumsOfBlock +
                    thread / kWarpgroup * (kSumsOfThread * kWarpgroup) + thread % kWarpgroup * 4;
    if ((turn & 1) != 0) {
#pragma unroll
        for (int i = 0; i < kSumsOfThread; i += 4) {
            *reinterpret_cast<float4*>(target + i * kWarpgroup) =
                make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kSumsOfThread; i += 4) {
            add_f32x4(target + i * kWarpgroup, sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
        }
    }
    release(shared.turn_taken);
}

// Writes ds of this consumer's keys, held in the layout of a left operand, to shared memory.
template <typename Scores, int kSteps>
__device__ __forceinline__ void stage_scores(uint8* staged, const uint32 (&words)[kSteps][4],
                                             uint32 consumer) {
    // Recomputed at each call: there are no registers to keep eight addresses.
    const uint32 thread = opaque(threadIdx.x);
    const uint32 lane = thread % 32;
    const uint32 key = consumer * kWaveM + thread % kWarpgroup / 32 * 16 + lane / 4;
    const uint32 first = Scores::offset(key, 0) + lane % 4 * 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int word = 0; word < 4; ++word) {
            // Eight rows further, the swizzle of units is the same.
            const int unit = 2 * step + word / 2;
            const uint32 offset = (first ^ unit % 8 * 16) + unit / 8 * Scores::kChunkBytes +
                                  word % 2 * 8 * kChunkRowBytes;
            *reinterpret_cast<uint32*>(staged + offset) = words[step][word];
        }
    }
}

// Writes zeros in place of ds.
template <typename Scores>
__device__ __forceinline__ void put_zeros(uint8* staged, uint32 consumer) {
    const uint32 thread = threadIdx.x % kWarpgroup;
#pragma unroll
    for (int unit = 0; unit < Scores::kBytes / 16 / kConsumers / kWarpgroup; ++unit) {
        const uint32 at = (unit * kConsumers + consumer) * kWarpgroup + thread;
        reinterpret_cast<uint4*>(staged)[at] = make_uint4(0, 0, 0, 0);
    }
}

// Starts sums = ds^T keys for 64 queries and 64 columns, over the keys of a tile, as one wgmma
// group. Both operands are `WgmmaRows::columns`.
template <typename Scores, typename Keys>
__device__ __forceinline__ void start_query_sums(float (&sums)[kSumsOfThread],
                                                 const WgmmaMatrix& scores,
                                                 const WgmmaMatrix& keys) {
    wgmma_bf16<false, true, true>(sums, scores.at(0), keys.at(0));
#pragma unroll
    for (int step = 1; step < kTileRows / 16; ++step) {
        wgmma_bf16<true, true, true>(sums, scores.at(Scores::row_step(step)),
                                     keys.at(Keys::row_step(step)));
    }
    wgmma_commit();
}

}  // namespace sm90_attention
