// Tiles of attention on tcgen05: their blocks of keys, and the numbers of a CTA's tiles, which the
// producer takes from a counter and passes to the other warps.
#pragma once

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "mma/sm100_attention_tile.cuh"
#include "mma/sm100_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/special_register.cuh"
#include "scheduler/attention_order.cuh"

namespace sm100_attention {

using sm100::PipelineState;

struct Arguments {
    float* lse;
    uint32* counters;      // tiles taken, CTAs done; zero before and after
    int32 seq;
    uint32 heads;
    uint32 kv_heads;
    uint32 batch_heads;    // batch * heads
    uint32 section_heads;  // see scheduler/attention_order.cuh
    uint32 causal;
    float scale_log2;      // scale * log2(e), positive
    // For extended kernels.
    int32 window;            // at most the keys of a sequence, which also means no window
    const float* sinks;      // [heads], or null
    const int32* documents;  // [batch * seq, 2], or null

    __device__ __forceinline__ SeenKeys seen_keys() const {
        return SeenKeys{documents, seq, window};
    }

    // Returns the end of the keys that a query sees; `query` may be beyond the sequence.
    __device__ __forceinline__ int32 seen_end(int32 query) const {
        return causal != 0 ? min(seq, query + 1) : seq;
    }
};

// Blocks of keys, processed from the last to the first.
struct KeyBlocks {
    int32 begin;
    int32 end;

    __device__ __forceinline__ bool has(int32 block) const {
        return block >= begin && block < end;
    }
};

struct QueryTile {
    uint32 batch;
    uint32 head;
    int32 first_query;
    KeyBlocks blocks[kHalves];  // none of a half beyond the sequence

    // The same for a half that the compiler does not know, without an array in local memory.
    __device__ __forceinline__ KeyBlocks blocks_of(uint32 half) const {
        return half == 0 ? blocks[0] : blocks[1];
    }

    // First query of a half.
    __device__ __forceinline__ int32 first_of(uint32 half) const {
        return first_query + (kHalves - 1 - half) * kHalfM;
    }

    // Blocks that any half sees. The halves' blocks overlap or are neighbors: each query sees its
    // own key, or all keys.
    __device__ __forceinline__ KeyBlocks all_blocks() const {
        return KeyBlocks{blocks[1].begin, max(blocks[0].end, blocks[1].end)};
    }
};

template <typename S>
struct Tiles {
    uint32 of_head;
    uint32 all;

    __device__ __forceinline__ explicit Tiles(const Arguments& arguments)
        : of_head((arguments.seq + kHalves * kHalfM - 1) / (kHalves * kHalfM)),
          all(of_head * arguments.batch_heads) {}

    __device__ __forceinline__ QueryTile at(uint32 number, const Arguments& arguments) const {
        const HeadTileIndex index =
            head_tile_at(number, of_head, arguments.batch_heads, arguments.section_heads);
        QueryTile tile;
        tile.batch = index.head / arguments.heads;
        tile.head = index.head - tile.batch * arguments.heads;
        // The last queries see the most keys, so they come first.
        tile.first_query = (arguments.causal != 0 ? of_head - 1 - index.tile : index.tile) *
                           (kHalves * kHalfM);
#pragma unroll
        for (uint32 half = 0; half < kHalves; ++half) {
            const int32 first = tile.first_of(half);
            tile.blocks[half] = KeyBlocks{0, 0};
            if (first < arguments.seq) {
                if (S::kExtended) {
                    tile.blocks[half].begin =
                        max(0, arguments.seen_keys().first_seen(tile.batch * arguments.seq,
                                                                first)) / kBlockN;
                }
                tile.blocks[half].end =
                    (arguments.seen_end(first + kHalfM - 1) + kBlockN - 1) / kBlockN;
            }
        }
        return tile;
    }
};

// The producer's end: passes a tile's number, or one beyond all tiles.
template <typename S>
class TileWriter {
    PipelineState<S::kTileSlots> slot_;

  public:
    __device__ __forceinline__ void pass(const Shared<S>& shared, uint32 number) {
        mbarrier_wait(shared.tiles_empty + slot_.index, slot_.phase ^ 1);
        shared.tiles[slot_.index] = number;
        mbarrier_arrive(shared.tiles_full + slot_.index);
        slot_.advance();
    }
};

// A reader's end, of a whole warp or of one thread of a warp.
template <typename S, bool kWholeWarp>
class TileReader {
    const Shared<S>& shared_;
    const Arguments& arguments_;
    uint32 tiles_read_ = 0;  // gives the slot and the phase

    // By one thread: returns the number of a tile, and lets the producer write the next one.
    __device__ __forceinline__ uint32 take() const {
        const uint32 slot = tiles_read_ % S::kTileSlots;
        mbarrier_wait(shared_.tiles_full + slot, tiles_read_ / S::kTileSlots % 2);
        const uint32 number = shared_.tiles[slot];
        mbarrier_arrive(shared_.tiles_empty + slot);
        return number;
    }

  public:
    __device__ __forceinline__ TileReader(const Shared<S>& shared, const Arguments& arguments)
        : shared_(shared), arguments_(arguments) {}

    // Returns whether there is another tile.
    __device__ __forceinline__ bool next(QueryTile& tile) {
        uint32 number = 0;
        if (!kWholeWarp || thread_index_again() % 32 == 0) {
            number = take();
        }
        if (kWholeWarp) {
            number = __shfl_sync(0xffffffffu, number, 0);
        }
        ++tiles_read_;
        const Tiles<S> tiles(arguments_);
        if (number >= tiles.all) {
            return false;
        }
        tile = tiles.at(number, arguments_);
        return true;
    }
};

}  // namespace sm100_attention
