// dq of a tile of queries, over all keys that the queries see.
//
// A warp computes 16 or 32 queries, the rows of p and ds. ds stays in registers as the left operand
// of ds k. Keys and values are loaded in stages of 32 or 64 rows, double buffered.
#pragma once

#include "common/infinity.cuh"
#include "common/opaque.cuh"
#include "common/types.cuh"
#include "layout/attention_gradients.cuh"
#include "layout/head_tile.cuh"
#include "mma/head_mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/exp2.cuh"

template <int kHeadDim, bool kPadded, bool kExtended, bool kPart, typename Out>
__device__ __forceinline__ void make_query_gradients(const AttentionGradients<Out>& arguments,
                                                     const volatile GradientWork* work,
                                                     uint8* shared_memory) {
    using Tiles = GradientTiles<kHeadDim>;
    constexpr int kM = Tiles::kQueryM;
    constexpr int kN = Tiles::kChunkKeys / 16;
    constexpr int kRowBytes = Tiles::kRowBytes;
    // Kernels for a part of the keys support no documents.
    constexpr bool kWindows = kExtended;
    const auto first_seen = [&](int query) {
        return arguments.template first_seen<kPart>(work->first_token, query);
    };

    const int seq = arguments.seq;
    const bool causal = arguments.causal != 0;
    const int first_query = work->first_row;
    const uint64 query_offset = work->own_offset;
    // Number of keys that a query sees; earlier queries see no more keys.
    const auto keys_of = [&](int query) {
        const int seen = causal ? min(seq, query + 1) : seq;
        return kPart ? arguments.part.seen(query, seen) : seen;
    };
    const int keys_seen = keys_of(first_query + Tiles::kBlockQueries - 1);
    const int stages = (keys_seen + Tiles::kStageKeys - 1) / Tiles::kStageKeys;
    // First stage with a key that any query of the tile sees.
    const int first_stage =
        kWindows ? max(0, first_seen(first_query)) / Tiles::kStageKeys : 0;

    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const uint32 query_stride = arguments.heads * width;
    const uint32 key_stride = arguments.kv_heads * width;
    const uint32 values = value_width<kHeadDim, kPadded, kExtended>(arguments);
    const uint32 dout_stride = arguments.heads * values;
    const uint32 value_stride = arguments.kv_heads * values;
    const uint32 memory = shared_address(shared_memory);
    const uint32 stage_memory = memory + 2 * Tiles::kQueryTileBytes;
    const auto copy_stage = [&](int stage) {
        const uint32 target = stage_memory + stage % 2 * Tiles::kKeysBytes;
        const int first = stage * Tiles::kStageKeys;
        const uint64 from = work->streamed_offset + static_cast<uint64>(first) * key_stride;
        copy_head_tile<kHeadDim, Tiles::kStageKeys, Tiles::kThreads, 1>(target, arguments.k + from,
                                                              key_stride, seq - first, width);
        const uint64 values_from =
            kExtended ? work->streamed_value_offset + static_cast<uint64>(first) * value_stride
                      : from;
        copy_head_tile<kHeadDim, Tiles::kStageKeys, Tiles::kThreads, 1>(
            target + Tiles::kKeyStageBytes, arguments.v + values_from, value_stride, seq - first,
            values);
    };
    uint64 dout_offset = query_offset;
    if constexpr (kExtended) {
        dout_offset = work->own_value_offset;
    }
    copy_head_tile<kHeadDim, Tiles::kBlockQueries, Tiles::kThreads, 1>(
        memory, arguments.q + query_offset, query_stride, seq - first_query, width);
    copy_head_tile<kHeadDim, Tiles::kBlockQueries, Tiles::kThreads, 1>(
        memory + Tiles::kQueryTileBytes, arguments.dout + dout_offset, dout_stride,
        seq - first_query, values);
    cp_async_commit();
    copy_stage(first_stage);
    cp_async_commit();

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_row = warp * kM * 16;
    const int warp_query = first_query + warp_row;

    RowStatistics statistics[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = warp_query + 16 * m + lane / 4 + 8 * half;
            statistics[m][half] = RowStatistics{0.0f, 0.0f};
            if (query < seq) {
                const uint32 at = work->statistics_offset + query;
                // Other CTAs of this launch have written the statistics.
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
    for (int stage = first_stage; stage < stages; ++stage) {
        cp_async_wait<0>();
        __syncthreads();
        if (stage + 1 < stages) {
            copy_stage(stage + 1);
        }
        cp_async_commit();

        const uint32 stage_columns =
            columns_address<kHeadDim>(stage_memory + stage % 2 * Tiles::kKeysBytes, lane);
        const uint32 stage_summed =
            summed_address<kHeadDim>(stage_memory + stage % 2 * Tiles::kKeysBytes, lane);
#pragma unroll 1
        for (int chunk = 0; chunk < Tiles::kStageKeys; chunk += Tiles::kChunkKeys) {
            const int first_key = stage * Tiles::kStageKeys + chunk;
            // Recomputed in every iteration: windows and documents leave no registers to keep these
            // values.
            const int thread = static_cast<int>(kExtended ? opaque(threadIdx.x) : threadIdx.x);
            const int lane_here = kExtended ? thread % 32 : lane;
            const int query_here =
                kExtended ? work->first_row + thread / 32 * kM * 16 : warp_query;
            // Number of keys that at least one query, and that all queries of this warp see.
            const int some_see =
                query_here >= seq ? 0 : keys_of(query_here + kM * 16 - 1);
            const int all_see = keys_of(query_here);
            if (first_key >= some_see) {
                break;
            }
            // These keys precede the windows or documents of all queries of this warp.
            if (kWindows && first_key + Tiles::kChunkKeys <= first_seen(query_here)) {
                continue;
            }
            const uint32 keys = stage_columns + chunk * kRowBytes;
            float p[kM][2 * kN][4];
            if constexpr (Tiles::kQueriesInRegisters) {
                multiply_rows<kHeadDim, kM, kN>(p, query_words, keys);
            } else {
                multiply_rows<kHeadDim, kM, kN>(p, queries, keys);
            }
            if (first_key + Tiles::kChunkKeys > all_see ||
                (kWindows && first_key < first_seen(query_here + kM * 16 - 1))) {
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    int first[2] = {0, 0};
                    int seen[2] = {0, 0};
                    if constexpr (kWindows || kPart) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int query = query_here + 16 * m + lane_here / 4 + 8 * half;
                            if constexpr (kWindows) {
                                first[half] = first_seen(query);
                            }
                            if constexpr (kPart) {
                                seen[half] = keys_of(query);
                            }
                        }
                    }
#pragma unroll
                    for (int n = 0; n < 2 * kN; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int query =
                                query_here + 16 * m + lane_here / 4 + e / 2 * 8;
                            const int key = first_key + 8 * n + lane_here % 4 * 2 + e % 2;
                            if ((kPart ? key >= seen[e / 2]
                                       : key >= seq || (causal && key > query)) ||
                                (kWindows && key < first[e / 2])) {
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
                multiply_rows<kHeadDim, kM, kN, HeadTile<kHeadDim>::kValueElements>(
                    ds, queries + Tiles::kQueryTileBytes, keys + Tiles::kKeyStageBytes);
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

    if constexpr (kPart) {
        // If no query sees a key, the loop has not waited for the copies.
        cp_async_wait<0>();
    }
    float scales[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
        scales[m][0] = scales[m][1] = arguments.scale;
    }
    // Only this warp reads its queries, and all its reads are done.
    const int row =
        kExtended ? static_cast<int>(opaque(threadIdx.x)) / 32 * kM * 16 : warp_row;
    write_head_rows<kHeadDim, kM>(
        dq, scales, shared_memory + row * kRowBytes,
        arguments.dq + work->own_offset + static_cast<uint64>(row) * query_stride,
        query_stride, seq - work->first_row - row, width);
}
