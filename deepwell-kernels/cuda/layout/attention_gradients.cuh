// Arguments, tiles and shared memory layout of attention_backward.cu.
#pragma once

#include "common/seen_keys.cuh"
#include "common/seen_part.cuh"
#include "common/types.cuh"
#include "layout/head_tile.cuh"

__host__ __device__ constexpr int larger(int a, int b) {
    return a > b ? a : b;
}

// Statistics of a row of scores: lse in powers of two, and delta.
struct __align__(8) RowStatistics {
    float lse_log2;
    float delta;
};

// Work item of a CTA. It stays in shared memory and is read at each use, because no registers are
// free for it during the MMA loops.
struct __align__(16) GradientWork {
    uint64 own_offset;         // elements to the head's part of the first row of the tile
    uint64 streamed_offset;    // elements to the first row that is streamed past the tile
    uint32 statistics_offset;  // rows to the statistics of the tile, or of the streamed rows
    int32 first_row;           // of the tile, in its sequence
    uint32 item;               // index of the work item, over all kinds
    uint32 first_token;        // of the tile's sequence, in the batch (extended kernels)
    // Offsets for values and dout, if their width differs from keys (extended kernels).
    uint64 own_value_offset;
    uint64 streamed_value_offset;
};

template <int kHeadDim>
struct GradientTiles {
    static constexpr int kWarps = 4;
    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kRowBytes = HeadTile<kHeadDim>::kRowBytes;

    // Tiles of keys. dk and dv of 32 rows of 128 elements do not fit into a warp's registers.
    static constexpr int kKeyM = kHeadDim >= 128 ? 1 : 2;
    static constexpr int kBlockKeys = kWarps * kKeyM * 16;
    static constexpr int kStageQueries = kHeadDim > 128 ? 32 : 64;
    static constexpr int kChunkQueries = kHeadDim == 128 ? 64 : kHeadDim > 128 ? 16 : 32;
    static constexpr int kKeyTileBytes = kBlockKeys * kRowBytes;
    static constexpr int kQueryStageBytes = kStageQueries * kRowBytes;
    // Queries, dout and statistics.
    static constexpr int kQueriesBytes =
        2 * kQueryStageBytes + kStageQueries * static_cast<int>(sizeof(RowStatistics));
    static constexpr int kKeyWorkBytes = 2 * kKeyTileBytes + 2 * kQueriesBytes;

    // Tiles of queries.
    static constexpr int kQueryM = kHeadDim > 128 ? 1 : 2;
    static constexpr int kBlockQueries = kWarps * kQueryM * 16;
    static constexpr int kStageKeys = kHeadDim >= 128 ? 32 : 64;
    static constexpr int kChunkKeys = 32;
    static constexpr bool kQueriesInRegisters = kHeadDim < 128;
    static constexpr int kQueryTileBytes = kBlockQueries * kRowBytes;
    static constexpr int kKeyStageBytes = kStageKeys * kRowBytes;
    static constexpr int kKeysBytes = 2 * kKeyStageBytes;
    static constexpr int kQueryWorkBytes = 2 * kQueryTileBytes + 2 * kKeysBytes;

    // Shared memory: the larger of both kinds of work, then the work item.
    static constexpr int kWorkBytes = larger(kKeyWorkBytes, kQueryWorkBytes);
    static constexpr int kSharedBytes = kWorkBytes + static_cast<int>(sizeof(GradientWork));
    static_assert(kSharedBytes <= 98 * 1024, "a CTA of sm_120 may have 99 KiB");
};

template <typename Out>
struct AttentionGradients {
    const bf16* dout;
    const bf16* q;
    const bf16* k;
    const bf16* v;
    const bf16* out;
    const float* lse;
    Out* dq;
    Out* dk;
    Out* dv;
    RowStatistics* statistics;  // [batch, heads, seq]
    uint32* counters;           // work items taken, rows done, CTAs done; zero before and after
    uint32 seq;
    uint32 heads;
    uint32 kv_heads;
    uint32 batch;
    uint32 key_section;    // sequences' key heads of a section, see scheduler/attention_order.cuh
    uint32 query_section;  // sequences' query heads of a section
    uint32 causal;
    float scale;
    float scale_log2;  // scale * log2(e), positive
    uint32 head_dim;   // see head_width
    // Of extended kernels, see attention.cu.
    uint32 value_dim;
    uint32 window;  // at most the keys of a sequence; equal to them if there is no window
    const int32* documents;  // [batch * seq, 2], or null
    SeenPart part;           // of kernels for a part of the keys

    template <bool kPart>
    __device__ __forceinline__ int first_seen(uint32 first_token, int query) const {
        if constexpr (kPart) {
            return part.first_in_window(query, static_cast<int32>(seq));
        }
        return seen_keys().first_seen(first_token, query);
    }

    template <bool kPart>
    __device__ __forceinline__ int last_seeing(uint32 first_token, int key) const {
        if constexpr (kPart) {
            return part.last_with_window(key, static_cast<int32>(seq));
        }
        return seen_keys().last_seeing(first_token, key);
    }

    __device__ __forceinline__ SeenKeys seen_keys() const {
        return SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)};
    }
};

// Returns the number of elements of a value, and of a row of dout, in global memory.
template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ uint32 value_width(const AttentionGradients<Out>& arguments) {
    return kExtended ? arguments.value_dim : head_width<kHeadDim, kPadded>(arguments.head_dim);
}
