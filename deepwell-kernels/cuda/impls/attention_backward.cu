// Gradients of attention (impls/attention.cu): dq, dk and dv from dout, q, k, v, out and lse.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// dout, q, out, dq [batch * seq, heads * D], k, v, dk, dv [batch * seq, kv_heads * D] BF16, lse
// [batch, heads, seq] FP32. With p = exp(scale q k^T - lse) and delta = sum(dout * out) by row:
//   dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale ds k,  dk = scale ds^T q.
//
// One launch, three kinds of work, in the order in which blocks take it from a counter:
//   1. rows:    delta and lse in powers of two, for some rows, into the workspace;
//   2. keys:    dk and dv of a tile of keys, over all queries of all heads that share them;
//   3. queries: dq of a tile of queries, over all keys.
// Kinds 2 and 3 each compute p anew: 7 products instead of 5, but no gradient is summed by more
// than one block, in an order that is fixed, and none passes through memory in FP32. Both begin
// when the rows are done. Whoever waits has taken its work after all rows were taken by blocks
// that are running and wait for nothing, so the wait ends however few blocks run at a time.
//
// A warp owns 16 or 32 rows of its tile and never needs another warp's scores: keys are the rows
// of p^T in kind 2, queries those of p in kind 3, so that results of one product are, without
// leaving registers, the left operand of the next.
#include "common/bf16x8.cuh"
#include "common/last_block.cuh"
#include "common/types.cuh"
#include "layout/attention_order.cuh"
#include "layout/head_tile.cuh"
#include "mma/head_product.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/exp2.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float minus_infinity() {
    return __uint_as_float(0xff800000u);
}

__host__ __device__ constexpr int larger(int a, int b) {
    return a > b ? a : b;
}

// Of a row of scores: lse in powers of two, and delta.
struct __align__(8) RowStatistics {
    float lse_log2;
    float delta;
};

template <int kHeadDim>
struct Tiling {
    static constexpr int kRowBytes = HeadTile<kHeadDim>::kRowBytes;

    // Kind 2. dk and dv of 32 rows of 128 elements do not fit into a warp's registers.
    static constexpr int kKeyM = kHeadDim == 128 ? 1 : 2;
    static constexpr int kBlockKeys = kWarps * kKeyM * 16;
    static constexpr int kStageQueries = 64;
    static constexpr int kChunkQueries = kHeadDim == 128 ? 64 : 32;
    static constexpr int kKeyTileBytes = kBlockKeys * kRowBytes;
    static constexpr int kQueryStageBytes = kStageQueries * kRowBytes;
    // Queries, dout and statistics.
    static constexpr int kStageBytes2 =
        2 * kQueryStageBytes + kStageQueries * static_cast<int>(sizeof(RowStatistics));
    static constexpr int kWorkBytes2 = 2 * kKeyTileBytes + 2 * kStageBytes2;

    // Kind 3.
    static constexpr int kQueryM = 2;
    static constexpr int kBlockQueries = kWarps * kQueryM * 16;
    static constexpr int kStageKeys = kHeadDim == 128 ? 32 : 64;
    static constexpr int kChunkKeys = 32;
    static constexpr bool kQueriesInRegisters = kHeadDim < 128;
    static constexpr int kQueryTileBytes = kBlockQueries * kRowBytes;
    static constexpr int kKeyStageBytes = kStageKeys * kRowBytes;
    static constexpr int kStageBytes3 = 2 * kKeyStageBytes;
    static constexpr int kWorkBytes3 = 2 * kQueryTileBytes + 2 * kStageBytes3;

    // Shared memory: that of a kind, then what is kept.
    static constexpr int kWorkBytes = larger(kWorkBytes2, kWorkBytes3);
    static constexpr int kSharedBytes = kWorkBytes + 16;
    static_assert(kSharedBytes <= 98 * 1024, "a block of sm_120 may have 99 KiB");

    // Kind 1.
    static constexpr int kRowsPerPass = kThreads / HeadTile<kHeadDim>::kUnits;
    static constexpr int kRowsPerItem = 256;
};

struct Arguments {
    const bf16* dout;
    const bf16* q;
    const bf16* k;
    const bf16* v;
    const bf16* out;
    const float* lse;
    bf16* dq;
    bf16* dk;
    bf16* dv;
    RowStatistics* statistics;  // [batch, heads, seq]
    uint32* counters;           // work taken, rows done, blocks done; zero before and after
    uint32 seq;
    uint32 heads;
    uint32 kv_heads;
    uint32 batch;
    uint32 key_section;    // sequences' key heads of a section, see layout/attention_order.cuh
    uint32 query_section;  // sequences' query heads of a section
    uint32 causal;
    float scale;
    float scale_log2;  // scale * log2(e), positive
};

// Numbers of a block's work that it needs now and then. They are kept in shared memory and read
// from there each time, since there are no registers to hold them while products are summed.
struct Kept {
    uint64 offset;      // elements to the first row of what is streamed
    uint32 statistics;  // rows to the first statistics of what is streamed
    uint32 item;        // number of the work, over all kinds
};

// ------------------------------------------------------------------------------------- rows

template <int kHeadDim>
__device__ __forceinline__ void make_statistics(const Arguments& arguments, uint32 item) {
    using Tiles = Tiling<kHeadDim>;
    constexpr int kUnits = HeadTile<kHeadDim>::kUnits;
    const uint32 rows = arguments.batch * arguments.heads * arguments.seq;
    const uint32 unit = threadIdx.x % kUnits;
#pragma unroll 4
    for (int pass = 0; pass < Tiles::kRowsPerItem / Tiles::kRowsPerPass; ++pass) {
        // In the order of memory: token, then head.
        const uint32 row = item * Tiles::kRowsPerItem + pass * Tiles::kRowsPerPass +
                           threadIdx.x / kUnits;
        float sum = 0.0f;
        if (row < rows) {
            const uint64 at = static_cast<uint64>(row) * kUnits + unit;
            float out[8], dout[8];
            unpack_bf16x8(reinterpret_cast<const uint4*>(arguments.out)[at], out);
            unpack_bf16x8(reinterpret_cast<const uint4*>(arguments.dout)[at], dout);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum = fmaf(out[i], dout[i], sum);
            }
        }
#pragma unroll
        for (int distance = kUnits / 2; distance > 0; distance /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        }
        if (unit == 0 && row < rows) {
            const uint32 token = row / arguments.heads;
            const uint32 head = row - token * arguments.heads;
            const uint32 batch = token / arguments.seq;
            const uint32 query = token - batch * arguments.seq;
            const uint32 to = (batch * arguments.heads + head) * arguments.seq + query;
            arguments.statistics[to] = RowStatistics{arguments.lse[to] * kLog2E, sum};
        }
    }
}

// ------------------------------------------------------------------------------------- keys

// Where a block of kind 2 works.
template <int kHeadDim>
struct KeyPlace {
    int first_key;             // in its sequence
    uint64 key_offset;         // elements to the key head's part of the first key in k and v
    uint64 query_offset;       // elements to the first query of the first head that shares them
    uint32 statistics_offset;  // rows to the statistics of that head

    __device__ __forceinline__ KeyPlace(const Arguments& arguments, uint32 item, uint32 tiles) {
        const uint32 heads = arguments.heads;
        const uint32 kv_heads = arguments.kv_heads;
        const HeadTileIndex index =
            head_tile_at(item, tiles, arguments.batch * kv_heads, arguments.key_section);
        const uint32 batch = index.head / kv_heads;
        const uint32 kv_head = index.head - batch * kv_heads;
        const uint32 head = kv_head * (heads / kv_heads);
        const uint64 token = static_cast<uint64>(batch) * arguments.seq;
        // The first keys are seen by the most queries.
        first_key = index.tile * Tiling<kHeadDim>::kBlockKeys;
        key_offset = ((token + first_key) * kv_heads + kv_head) * kHeadDim;
        query_offset = (token * heads + head) * kHeadDim;
        statistics_offset = (batch * heads + head) * arguments.seq;
    }
};

// Starts the copy of a stage to `target`: queries of a head of the group, dout and statistics.
template <int kHeadDim>
__device__ __forceinline__ void copy_queries(const Arguments& arguments, uint32 target,
                                             uint64 query_offset, uint32 statistics_offset,
                                             int tile, uint32 in_group) {
    using Tiles = Tiling<kHeadDim>;
    const int first = tile * Tiles::kStageQueries;
    const int rows_left = static_cast<int>(arguments.seq) - first;
    const uint32 stride = arguments.heads * kHeadDim;
    const uint64 from = query_offset + static_cast<uint64>(first) * stride + in_group * kHeadDim;
    copy_head_tile<kHeadDim, Tiles::kStageQueries, kThreads>(target, arguments.q + from, stride,
                                                             rows_left);
    copy_head_tile<kHeadDim, Tiles::kStageQueries, kThreads>(
        target + Tiles::kQueryStageBytes, arguments.dout + from, stride, rows_left);
    if (threadIdx.x < Tiles::kStageQueries) {
        // Rows beyond the sequence: zeros in all operands, so p is 1, dout 0 and ds 0.
        const int row = threadIdx.x;
        const bool inside = row < rows_left;
        const uint32 at =
            statistics_offset + in_group * arguments.seq + first + (inside ? row : 0);
        cp_async_8(target + 2 * Tiles::kQueryStageBytes + row * 8, arguments.statistics + at,
                   inside ? 8 : 0);
    }
}

template <int kHeadDim>
__device__ __forceinline__ void make_key_gradients(const Arguments& arguments,
                                                   volatile Kept* kept, uint32 first_item,
                                                   uint32 tiles, uint8* shared_memory) {
    using Tiles = Tiling<kHeadDim>;
    constexpr int kM = Tiles::kKeyM;
    constexpr int kN = Tiles::kChunkQueries / 16;
    constexpr int kRowBytes = Tiles::kRowBytes;

    const KeyPlace<kHeadDim> place(arguments, kept->item - first_item, tiles);
    const uint32 group = arguments.heads / arguments.kv_heads;
    const int seq = arguments.seq;
    const bool causal = arguments.causal != 0;
    const int first_key = place.first_key;
    const uint32 key_stride = arguments.kv_heads * kHeadDim;
    const uint32 memory = shared_address(shared_memory);
    const uint32 stage_memory = memory + 2 * Tiles::kKeyTileBytes;
    copy_head_tile<kHeadDim, Tiles::kBlockKeys, kThreads>(
        memory, arguments.k + place.key_offset, key_stride, seq - first_key);
    copy_head_tile<kHeadDim, Tiles::kBlockKeys, kThreads>(
        memory + Tiles::kKeyTileBytes, arguments.v + place.key_offset, key_stride,
        seq - first_key);

    // From the last queries on, which all keys see: blocks that run side by side read the same.
    const int first_tile = causal ? first_key / Tiles::kStageQueries : 0;
    int tile = (seq - 1) / Tiles::kStageQueries;
    uint32 in_group = 0;
    int slot = 0;
    copy_queries<kHeadDim>(arguments, stage_memory, place.query_offset, place.statistics_offset,
                           tile, in_group);
    cp_async_commit();
    if (threadIdx.x == 0) {
        kept->offset = place.query_offset;
        kept->statistics = place.statistics_offset;
    }

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_row = warp * kM * 16;
    const int warp_key = first_key + warp_row;
    const uint32 keys = summed_address<kHeadDim>(memory + warp_row * kRowBytes, lane);
    const float scale_log2 = arguments.scale_log2;

    float dk[kM][kHeadDim / 8][4];
    float dv[kM][kHeadDim / 8][4];
    set_zero(dk);
    set_zero(dv);
#pragma unroll 1
    while (tile >= first_tile) {
        cp_async_wait<0>();
        __syncthreads();
        const int this_tile = tile;
        const int this_slot = slot;
        if (++in_group == group) {
            in_group = 0;
            --tile;
        }
        slot ^= 1;
        if (tile >= first_tile) {
            copy_queries<kHeadDim>(arguments, stage_memory + slot * Tiles::kStageBytes2,
                                   kept->offset, kept->statistics, tile, in_group);
        }
        cp_async_commit();

        const uint32 stage = stage_memory + this_slot * Tiles::kStageBytes2;
        const uint32 stage_columns = columns_address<kHeadDim>(stage, lane);
        const uint32 stage_summed = summed_address<kHeadDim>(stage, lane);
        const uint8* statistics = shared_memory + 2 * Tiles::kKeyTileBytes +
                                  this_slot * Tiles::kStageBytes2 +
                                  2 * Tiles::kQueryStageBytes;
#pragma unroll 1
        for (int chunk = 0; chunk < Tiles::kStageQueries; chunk += Tiles::kChunkQueries) {
            const int first_query = this_tile * Tiles::kStageQueries + chunk;
            // Queries beyond the sequence, or before all keys of this warp.
            if (first_query >= seq ||
                (causal && first_query + Tiles::kChunkQueries <= warp_key)) {
                continue;
            }
            const uint32 columns = stage_columns + chunk * kRowBytes;
            const uint32 summed = stage_summed + chunk * kRowBytes;
            float p[kM][2 * kN][4];
            multiply_rows<kHeadDim, kM, kN>(p, keys, columns);
            if (causal && first_query < warp_key + 16 * kM - 1) {
#pragma unroll
                for (int m = 0; m < kM; ++m) {
#pragma unroll
                    for (int n = 0; n < 2 * kN; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int key = warp_key + 16 * m + lane / 4 + e / 2 * 8;
                            const int query = first_query + 8 * n + lane % 4 * 2 + e % 2;
                            if (key > query) {
                                p[m][n][e] = minus_infinity();
                            }
                        }
                    }
                }
            }
            float ds[kM][2 * kN][4];
            multiply_rows<kHeadDim, kM, kN>(ds, keys + Tiles::kKeyTileBytes,
                                            columns + Tiles::kQueryStageBytes);
#pragma unroll
            for (int n = 0; n < 2 * kN; ++n) {
                // lse and delta of this thread's two columns.
                const float4 of = *reinterpret_cast<const float4*>(
                    statistics + (chunk + 8 * n + lane % 4 * 2) * 8);
#pragma unroll
                for (int m = 0; m < kM; ++m) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const float lse = e % 2 == 0 ? of.x : of.z;
                        const float delta = e % 2 == 0 ? of.y : of.w;
                        p[m][n][e] = ex2(fmaf(p[m][n][e], scale_log2, -lse));
                        ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - delta);
                    }
                }
            }
#pragma unroll
            for (int block = 0; block < kN; ++block) {
                uint32 left[kM][4];
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    to_left(left[m], p[m][2 * block], p[m][2 * block + 1]);
                }
                add_weighted_rows<kHeadDim, kM>(dv, left, summed + Tiles::kQueryStageBytes,
                                                block);
            }
#pragma unroll
            for (int block = 0; block < kN; ++block) {
                uint32 left[kM][4];
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    to_left(left[m], ds[m][2 * block], ds[m][2 * block + 1]);
                }
                add_weighted_rows<kHeadDim, kM>(dk, left, summed, block);
            }
        }
    }

    float scales[kM][2];
    float ones[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
        scales[m][0] = scales[m][1] = arguments.scale;
        ones[m][0] = ones[m][1] = 1.0f;
    }
    // Only this warp reads its keys and values, and it has.
    const KeyPlace<kHeadDim> target(arguments, kept->item - first_item, tiles);
    const int rows_left = seq - target.first_key - warp_row;
    const uint64 to = target.key_offset + static_cast<uint64>(warp_row) * key_stride;
    uint8* const own = shared_memory + warp_row * kRowBytes;
    write_head_rows<kHeadDim, kM>(dk, scales, own, arguments.dk + to, key_stride, rows_left);
    write_head_rows<kHeadDim, kM>(dv, ones, own + Tiles::kKeyTileBytes, arguments.dv + to,
                                  key_stride, rows_left);
}

// ---------------------------------------------------------------------------------- queries

// Where a block of kind 3 works.
template <int kHeadDim>
struct QueryPlace {
    int first_query;      // in its sequence
    uint32 batch_head;    // batch * heads + head
    uint64 query_offset;  // elements to the head's part of the first query in q and dq
    uint64 key_offset;    // elements to the key head's part of the sequence in k and v

    __device__ __forceinline__ QueryPlace(const Arguments& arguments, uint32 item,
                                          uint32 tiles) {
        const uint32 heads = arguments.heads;
        const HeadTileIndex index =
            head_tile_at(item, tiles, arguments.batch * heads, arguments.query_section);
        const uint32 batch = index.head / heads;
        const uint32 head = index.head - batch * heads;
        const uint32 kv_head = head / (heads / arguments.kv_heads);
        // The last queries see the most keys.
        const uint32 tile = arguments.causal != 0 ? tiles - 1 - index.tile : index.tile;
        const uint64 token = static_cast<uint64>(batch) * arguments.seq;
        first_query = tile * Tiling<kHeadDim>::kBlockQueries;
        batch_head = index.head;
        query_offset = ((token + first_query) * heads + head) * kHeadDim;
        key_offset = (token * arguments.kv_heads + kv_head) * kHeadDim;
    }
};

template <int kHeadDim>
__device__ __forceinline__ void make_query_gradients(const Arguments& arguments,
                                                     volatile Kept* kept, uint32 first_item,
                                                     uint32 tiles, uint8* shared_memory) {
    using Tiles = Tiling<kHeadDim>;
    constexpr int kM = Tiles::kQueryM;
    constexpr int kN = Tiles::kChunkKeys / 16;
    constexpr int kRowBytes = Tiles::kRowBytes;

    const QueryPlace<kHeadDim> place(arguments, kept->item - first_item, tiles);
    const int seq = arguments.seq;
    const bool causal = arguments.causal != 0;
    const int first_query = place.first_query;
    const int keys_seen = causal ? min(seq, first_query + Tiles::kBlockQueries) : seq;
    const int stages = (keys_seen + Tiles::kStageKeys - 1) / Tiles::kStageKeys;

    const uint32 query_stride = arguments.heads * kHeadDim;
    const uint32 key_stride = arguments.kv_heads * kHeadDim;
    const uint32 memory = shared_address(shared_memory);
    const uint32 stage_memory = memory + 2 * Tiles::kQueryTileBytes;
    const auto copy_stage = [&](int stage, uint64 key_offset) {
        const uint32 target = stage_memory + stage % 2 * Tiles::kStageBytes3;
        const int first = stage * Tiles::kStageKeys;
        const uint64 from = key_offset + static_cast<uint64>(first) * key_stride;
        copy_head_tile<kHeadDim, Tiles::kStageKeys, kThreads>(target, arguments.k + from,
                                                              key_stride, seq - first);
        copy_head_tile<kHeadDim, Tiles::kStageKeys, kThreads>(
            target + Tiles::kKeyStageBytes, arguments.v + from, key_stride, seq - first);
    };
    copy_head_tile<kHeadDim, Tiles::kBlockQueries, kThreads>(
        memory, arguments.q + place.query_offset, query_stride, seq - first_query);
    copy_head_tile<kHeadDim, Tiles::kBlockQueries, kThreads>(
        memory + Tiles::kQueryTileBytes, arguments.dout + place.query_offset, query_stride,
        seq - first_query);
    cp_async_commit();
    copy_stage(0, place.key_offset);
    cp_async_commit();
    if (threadIdx.x == 0) {
        kept->offset = place.key_offset;
    }

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_row = warp * kM * 16;
    const int warp_query = first_query + warp_row;
    // Keys that some query, and that all queries of this warp see.
    const int some_see =
        warp_query >= seq ? 0 : (causal ? min(seq, warp_query + kM * 16) : seq);
    const int all_see = causal ? min(seq, warp_query + 1) : seq;

    RowStatistics statistics[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = warp_query + 16 * m + lane / 4 + 8 * half;
            statistics[m][half] = RowStatistics{0.0f, 0.0f};
            if (query < seq) {
                const uint64 at = static_cast<uint64>(place.batch_head) * seq + query;
                // Other blocks have written it since the launch.
                const float2 of =
                    __ldcg(reinterpret_cast<const float2*>(arguments.statistics + at));
                statistics[m][half] = RowStatistics{of.x, of.y};
            }
        }
    }

    const uint32 queries = summed_address<kHeadDim>(memory + warp_row * kRowBytes, lane);
    constexpr int kHeld = Tiles::kQueriesInRegisters ? kHeadDim / 16 : 1;
    uint32 query_words[kM][kHeld][4];
    uint32 dout_words[kM][kHeld][4];
    if constexpr (Tiles::kQueriesInRegisters) {
        cp_async_wait<1>();
        __syncthreads();
        load_left<kHeadDim, kM>(query_words, queries);
        load_left<kHeadDim, kM>(dout_words, queries + Tiles::kQueryTileBytes);
    }

    const float scale_log2 = arguments.scale_log2;
    float dq[kM][kHeadDim / 8][4];
    set_zero(dq);
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
        cp_async_wait<0>();
        __syncthreads();
        if (stage + 1 < stages) {
            copy_stage(stage + 1, kept->offset);
        }
        cp_async_commit();

        const uint32 stage_columns =
            columns_address<kHeadDim>(stage_memory + stage % 2 * Tiles::kStageBytes3, lane);
        const uint32 stage_summed =
            summed_address<kHeadDim>(stage_memory + stage % 2 * Tiles::kStageBytes3, lane);
#pragma unroll 1
        for (int chunk = 0; chunk < Tiles::kStageKeys; chunk += Tiles::kChunkKeys) {
            const int first_key = stage * Tiles::kStageKeys + chunk;
            if (first_key >= some_see) {
                break;
            }
            const uint32 keys = stage_columns + chunk * kRowBytes;
            float p[kM][2 * kN][4];
            if constexpr (Tiles::kQueriesInRegisters) {
                multiply_rows<kHeadDim, kM, kN>(p, query_words, keys);
            } else {
                multiply_rows<kHeadDim, kM, kN>(p, queries, keys);
            }
            if (first_key + Tiles::kChunkKeys > all_see) {
#pragma unroll
                for (int m = 0; m < kM; ++m) {
#pragma unroll
                    for (int n = 0; n < 2 * kN; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int query = warp_query + 16 * m + lane / 4 + e / 2 * 8;
                            const int key = first_key + 8 * n + lane % 4 * 2 + e % 2;
                            if (key >= seq || (causal && key > query)) {
                                p[m][n][e] = minus_infinity();
                            }
                        }
                    }
                }
            }
            float ds[kM][2 * kN][4];
            if constexpr (Tiles::kQueriesInRegisters) {
                multiply_rows<kHeadDim, kM, kN>(ds, dout_words, keys + Tiles::kKeyStageBytes);
            } else {
                multiply_rows<kHeadDim, kM, kN>(ds, queries + Tiles::kQueryTileBytes,
                                                keys + Tiles::kKeyStageBytes);
            }
#pragma unroll
            for (int block = 0; block < kN; ++block) {
                uint32 left[kM][4];
#pragma unroll
                for (int m = 0; m < kM; ++m) {
#pragma unroll
                    for (int n = 2 * block; n < 2 * block + 2; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const RowStatistics& of = statistics[m][e / 2];
                            const float weight = ex2(fmaf(p[m][n][e], scale_log2, -of.lse_log2));
                            ds[m][n][e] = weight * (ds[m][n][e] - of.delta);
                        }
                    }
                    to_left(left[m], ds[m][2 * block], ds[m][2 * block + 1]);
                }
                add_weighted_rows<kHeadDim, kM>(dq, left, stage_summed + chunk * kRowBytes, block);
            }
        }
    }

    float scales[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
        scales[m][0] = scales[m][1] = arguments.scale;
    }
    // Only this warp reads its queries, and it has.
    const QueryPlace<kHeadDim> target(arguments, kept->item - first_item, tiles);
    write_head_rows<kHeadDim, kM>(
        dq, scales, shared_memory + warp_row * kRowBytes,
        arguments.dq + target.query_offset + static_cast<uint64>(warp_row) * query_stride,
        query_stride, seq - target.first_query - warp_row);
}

// -------------------------------------------------------------------------------- scheduling

template <int kHeadDim>
__device__ __forceinline__ void differentiate(const Arguments& arguments) {
    using Tiles = Tiling<kHeadDim>;
    extern __shared__ __align__(256) uint8 shared_memory[];
    volatile Kept* const kept = reinterpret_cast<Kept*>(shared_memory + Tiles::kWorkBytes);

    const uint32 seq = arguments.seq;
    const uint32 rows = arguments.batch * arguments.heads * seq;
    const uint32 row_items = (rows + Tiles::kRowsPerItem - 1) / Tiles::kRowsPerItem;
    const uint32 key_tiles = (seq + Tiles::kBlockKeys - 1) / Tiles::kBlockKeys;
    const uint32 key_items = key_tiles * arguments.batch * arguments.kv_heads;
    const uint32 query_tiles = (seq + Tiles::kBlockQueries - 1) / Tiles::kBlockQueries;
    const uint32 query_items = query_tiles * arguments.batch * arguments.heads;

    bool rows_done = false;
#pragma unroll 1
    for (;;) {
        // Nobody reads shared memory for the last item any more.
        __syncthreads();
        if (threadIdx.x == 0) {
            kept->item = atomicAdd(arguments.counters, 1u);
        }
        __syncthreads();
        uint32 item = kept->item;
        if (item < row_items) {
            make_statistics<kHeadDim>(arguments, item);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) {
                atomicAdd(arguments.counters + 1, 1u);
            }
            continue;
        }
        item -= row_items;
        if (item >= key_items + query_items) {
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
        if (item < key_items) {
            make_key_gradients<kHeadDim>(arguments, kept, row_items, key_tiles, shared_memory);
        } else {
            make_query_gradients<kHeadDim>(arguments, kept, row_items + key_items, query_tiles,
                                           shared_memory);
        }
    }
    if (is_last_block(arguments.counters + 2, gridDim.x) && threadIdx.x == 0) {
        arguments.counters[0] = 0;
        arguments.counters[1] = 0;
    }
}

#define DEEPWELL_ATTENTION_BACKWARD(kHeadDim)                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) attention_backward_d##kHeadDim(    \
        const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const bf16* out,          \
        const float* lse, bf16* dq, bf16* dk, bf16* dv, RowStatistics* statistics,               \
        uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch,               \
        uint32 key_section, uint32 query_section, uint32 causal, float scale,                    \
        float scale_log2) {                                                                      \
        differentiate<kHeadDim>(Arguments{dout, q, k, v, out, lse, dq, dk, dv, statistics,       \
                                          counters, seq, heads, kv_heads, batch, key_section,    \
                                          query_section, causal, scale, scale_log2});            \
    }

DEEPWELL_ATTENTION_BACKWARD(16)
DEEPWELL_ATTENTION_BACKWARD(32)
DEEPWELL_ATTENTION_BACKWARD(64)
DEEPWELL_ATTENTION_BACKWARD(128)
