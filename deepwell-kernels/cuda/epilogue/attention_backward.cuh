// Gradients of attention in one launch; CTAs take work items from a counter. The kernels of
// attention_backward.cu and attention_part_backward.cu instantiate this for either result type.
#pragma once

#include "common/bf16x8.cuh"
#include "common/last_cta.cuh"
#include "common/types.cuh"
#include "layout/attention_gradients.cuh"
#include "layout/head_tile.cuh"
#include "mma/attention_key_gradients.cuh"
#include "mma/attention_query_gradients.cuh"
#include "ptx/exp2.cuh"
#include "scheduler/attention_order.cuh"

constexpr int kThreads = GradientTiles<64>::kThreads;
// Rows of a work item of kind 1.
constexpr int kRowsPerItem = 256;
constexpr float kLog2E = 1.4426950408889634f;

// Kind 1: delta and lse of some rows.
template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ void make_statistics(const AttentionGradients<Out>& arguments,
                                                uint32 item) {
    constexpr int kUnits = HeadTile<kHeadDim>::kValueElements / 8;
    constexpr int kRowsPerPass = kThreads / kUnits;
    // Rows that a thread reads before it sums any, to keep enough loads in flight.
    constexpr int kAtOnce = 4;
    static_assert(kRowsPerItem % (kRowsPerPass * kAtOnce) == 0, "rows of all passes");

    const uint32 rows = arguments.batch * arguments.heads * arguments.seq;
    const uint32 unit = threadIdx.x % kUnits;
    const uint32 units = value_width<kHeadDim, kPadded, kExtended>(arguments) / 8;
    const uint4* const all_out = reinterpret_cast<const uint4*>(arguments.out);
    const uint4* const all_dout = reinterpret_cast<const uint4*>(arguments.dout);
    // Rows are in memory order: token, then head.
    uint32 first_row = item * kRowsPerItem + threadIdx.x / kUnits;
#pragma unroll 1
    for (int pass = 0; pass < kRowsPerItem / kRowsPerPass; pass += kAtOnce) {
        uint4 out_words[kAtOnce];
        uint4 dout_words[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const uint32 row = min(first_row + i * kRowsPerPass, rows - 1);
            const uint64 at = static_cast<uint64>(row) * units + unit;
            out_words[i] = dout_words[i] = make_uint4(0, 0, 0, 0);
            if (unit < units) {
                out_words[i] = all_out[at];
                dout_words[i] = all_dout[at];
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            float out[8], dout[8];
            unpack_bf16x8(out_words[i], out);
            unpack_bf16x8(dout_words[i], dout);
            float sum = 0.0f;
#pragma unroll
            for (int element = 0; element < 8; ++element) {
                sum = fmaf(out[element], dout[element], sum);
            }
#pragma unroll
            for (int distance = kUnits / 2; distance > 0; distance /= 2) {
                sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            }
            const uint32 row = first_row + i * kRowsPerPass;
            if (unit == 0 && row < rows) {
                const uint32 token = row / arguments.heads;
                const uint32 head = row - token * arguments.heads;
                const uint32 batch = token / arguments.seq;
                const uint32 query = token - batch * arguments.seq;
                const uint32 to = (batch * arguments.heads + head) * arguments.seq + query;
                arguments.statistics[to] = RowStatistics{arguments.lse[to] * kLog2E, sum};
            }
        }
        first_row += kAtOnce * kRowsPerPass;
    }
}

// Kind 2: dk and dv of a tile of keys.
template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ void place_keys(volatile GradientWork* work, uint32 item, uint32 tiles,
                                           const AttentionGradients<Out>& arguments) {
    const uint32 heads = arguments.heads;
    const uint32 kv_heads = arguments.kv_heads;
    const HeadTileIndex index =
        head_tile_at(item, tiles, arguments.batch * kv_heads, arguments.key_section);
    const uint32 batch = index.head / kv_heads;
    const uint32 kv_head = index.head - batch * kv_heads;
    // The first of the query heads that share these keys.
    const uint32 head = kv_head * (heads / kv_heads);
    const uint64 token = static_cast<uint64>(batch) * arguments.seq;
    // The first keys are seen by the most queries.
    const uint32 first_key = index.tile * GradientTiles<kHeadDim>::kBlockKeys;
    work->first_row = first_key;
    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const uint64 own_row = (token + first_key) * kv_heads + kv_head;
    const uint64 streamed_row = token * heads + head;
    work->own_offset = own_row * width;
    work->streamed_offset = streamed_row * width;
    if constexpr (kExtended) {
        work->own_value_offset = own_row * arguments.value_dim;
        work->streamed_value_offset = streamed_row * arguments.value_dim;
        work->first_token = batch * arguments.seq;
    }
    work->statistics_offset = (batch * heads + head) * arguments.seq;
}

// Kind 3: dq of a tile of queries.
template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ void place_queries(volatile GradientWork* work, uint32 item,
                                              uint32 tiles,
                                              const AttentionGradients<Out>& arguments) {
    const uint32 heads = arguments.heads;
    const uint32 kv_heads = arguments.kv_heads;
    const HeadTileIndex index =
        head_tile_at(item, tiles, arguments.batch * heads, arguments.query_section);
    const uint32 batch = index.head / heads;
    const uint32 head = index.head - batch * heads;
    const uint32 kv_head = head / (heads / kv_heads);
    const uint64 token = static_cast<uint64>(batch) * arguments.seq;
    // The last queries see the most keys.
    const uint32 tile = arguments.causal != 0 ? tiles - 1 - index.tile : index.tile;
    const uint32 first_query = tile * GradientTiles<kHeadDim>::kBlockQueries;
    work->first_row = first_query;
    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const uint64 own_row = (token + first_query) * heads + head;
    const uint64 streamed_row = token * kv_heads + kv_head;
    work->own_offset = own_row * width;
    work->streamed_offset = streamed_row * width;
    if constexpr (kExtended) {
        work->own_value_offset = own_row * arguments.value_dim;
        work->streamed_value_offset = streamed_row * arguments.value_dim;
        work->first_token = batch * arguments.seq;
    }
    work->statistics_offset = index.head * arguments.seq;
}

// `kPart`: queries see a part of these keys, see common/seen_part.cuh.
template <int kHeadDim, bool kPadded, bool kExtended, bool kPart, typename Out>
__device__ __forceinline__ void differentiate(const AttentionGradients<Out>& arguments) {
    using Tiles = GradientTiles<kHeadDim>;
    extern __shared__ __align__(256) uint8 shared_memory[];
    volatile GradientWork* const work =
        reinterpret_cast<GradientWork*>(shared_memory + Tiles::kWorkBytes);

    const uint32 seq = arguments.seq;
    const uint32 rows = arguments.batch * arguments.heads * seq;
    const uint32 row_items = (rows + kRowsPerItem - 1) / kRowsPerItem;
    const uint32 key_tiles = (seq + Tiles::kBlockKeys - 1) / Tiles::kBlockKeys;
    const uint32 key_items = key_tiles * arguments.batch * arguments.kv_heads;
    const uint32 query_tiles = (seq + Tiles::kBlockQueries - 1) / Tiles::kBlockQueries;
    const uint32 items =
        row_items + key_items + query_tiles * arguments.batch * arguments.heads;

    bool rows_done = false;
#pragma unroll 1
    for (;;) {
        // All threads have read shared memory for the previous item.
        __syncthreads();
        if (threadIdx.x == 0) {
            const uint32 taken = atomicAdd(arguments.counters, 1u);
            work->item = taken;
            if (taken >= row_items && taken < row_items + key_items) {
                place_keys<kHeadDim, kPadded, kExtended>(work, taken - row_items, key_tiles,
                                                         arguments);
            } else if (taken >= row_items + key_items && taken < items) {
                place_queries<kHeadDim, kPadded, kExtended>(work, taken - row_items - key_items,
                                                            query_tiles, arguments);
            }
        }
        __syncthreads();
        const uint32 item = work->item;
        if (item < row_items) {
            make_statistics<kHeadDim, kPadded, kExtended>(arguments, item);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                atomicAdd(arguments.counters + 1, 1u);
            }
            continue;
        }
        if (item >= items) {
            break;
        }
        if (!rows_done) {
            if (threadIdx.x == 0) {
                const volatile uint32* done = arguments.counters + 1;
                while (*done != row_items) {
                    __nanosleep(100);
                }
                __threadfence();
            }
            __syncthreads();
            rows_done = true;
        }
        if (item < row_items + key_items) {
            make_key_gradients<kHeadDim, kPadded, kExtended, kPart>(arguments, work,
                                                                    shared_memory);
        } else {
            make_query_gradients<kHeadDim, kPadded, kExtended, kPart>(arguments, work,
                                                                      shared_memory);
        }
    }
    if (is_last_cta(arguments.counters + 2, gridDim.x) && threadIdx.x == 0) {
        arguments.counters[0] = 0;
        arguments.counters[1] = 0;
    }
}
