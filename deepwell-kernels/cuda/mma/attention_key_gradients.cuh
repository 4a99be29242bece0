// dk and dv of a tile of keys, over all queries of all heads that share the keys.
//
// A warp computes 16 or 32 keys, the rows of p^T and ds^T. Both stay in registers as left operands
// of p^T dout and ds^T q. Queries and dout are loaded in stages of at most 64 rows, double
// buffered.
#pragma once

#include "common/infinity.cuh"
#include "common/opaque.cuh"
#include "common/types.cuh"
#include "layout/attention_gradients.cuh"
#include "layout/head_tile.cuh"
#include "mma/head_mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/exp2.cuh"

// Starts the copy of a stage to `target`: queries, dout and statistics of one head of the group.
template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ void copy_queries(const AttentionGradients<Out>& arguments,
                                             uint32 target, const volatile GradientWork* work,
                                             int tile, uint32 in_group) {
    using Tiles = GradientTiles<kHeadDim>;
    const int first = tile * Tiles::kStageQueries;
    const int rows_left = static_cast<int>(arguments.seq) - first;
    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const uint32 stride = arguments.heads * width;
    const uint64 from =
        work->streamed_offset + static_cast<uint64>(first) * stride + in_group * width;
    copy_head_tile<kHeadDim, Tiles::kStageQueries, Tiles::kThreads, 1>(target, arguments.q + from,
                                                                    stride, rows_left, width);
    const uint32 values = value_width<kHeadDim, kPadded, kExtended>(arguments);
    const uint32 dout_stride = arguments.heads * values;
    const uint64 dout_from = kExtended ? work->streamed_value_offset +
                                             static_cast<uint64>(first) * dout_stride +
                                             in_group * values
                                       : from;
    copy_head_tile<kHeadDim, Tiles::kStageQueries, Tiles::kThreads, 1>(
        target + Tiles::kQueryStageBytes, arguments.dout + dout_from, dout_stride, rows_left,
        values);
    if (threadIdx.x < Tiles::kStageQueries) {
        // Rows beyond the sequence are zero in all operands, so p is 1, dout 0 and ds 0.
        const int row = threadIdx.x;
        const bool inside = row < rows_left;
        const uint32 at =
            work->statistics_offset + in_group * arguments.seq + first + (inside ? row : 0);
        cp_async_8(target + 2 * Tiles::kQueryStageBytes + row * 8, arguments.statistics + at,
                   inside ? 8 : 0);
    }
}

// Returns the first tile of queries that sees any key of the work item; past the end if none does.
template <int kHeadDim, bool kPart, typename Out>
__device__ __forceinline__ int first_tile_of_work(const AttentionGradients<Out>& arguments,
                                                  const volatile GradientWork* work,
                                                  bool causal) {
    const int first_query = kPart    ? arguments.part.first_seeing(work->first_row, causal)
                            : causal ? work->first_row
                                     : 0;
    return first_query / GradientTiles<kHeadDim>::kStageQueries;
}

template <int kHeadDim, bool kPadded, bool kExtended, bool kPart, typename Out>
__device__ __forceinline__ void make_key_gradients(const AttentionGradients<Out>& arguments,
                                                   const volatile GradientWork* work,
                                                   uint8* shared_memory) {
    using Tiles = GradientTiles<kHeadDim>;
    constexpr int kM = Tiles::kKeyM;
    constexpr int kN = Tiles::kChunkQueries / 16;
    constexpr int kRowBytes = Tiles::kRowBytes;
    constexpr int kValueElements = HeadTile<kHeadDim>::kValueElements;
    // Kernels for a part of the keys support no documents.
    constexpr bool kWindows = kExtended;
    // Of kernels with windows.
    const auto last_seeing = [&](int key) {
        return arguments.template last_seeing<kPart>(work->first_token, key);
    };
    // Recompute cheap values in every iteration: the accumulators of 192 elements leave no
    // registers to keep them, nor do the accumulators of 128 elements with windows and documents.
    constexpr bool kAnew = kHeadDim > 128 || (kExtended && kHeadDim == 128);

    const uint32 group = arguments.heads / arguments.kv_heads;
    const int seq = arguments.seq;
    const bool causal = arguments.causal != 0;
    const int first_key = work->first_row;
    const uint64 key_offset = work->own_offset;
    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const uint32 key_stride = arguments.kv_heads * width;
    const uint32 memory = shared_address(shared_memory);
    const uint32 stage_memory = memory + 2 * Tiles::kKeyTileBytes;
    copy_head_tile<kHeadDim, Tiles::kBlockKeys, Tiles::kThreads, 1>(
        memory, arguments.k + key_offset, key_stride, seq - first_key, width);
    const uint32 values = value_width<kHeadDim, kPadded, kExtended>(arguments);
    const uint32 value_stride = arguments.kv_heads * values;
    uint64 value_offset = key_offset;
    if constexpr (kExtended) {
        value_offset = work->own_value_offset;
    }
    copy_head_tile<kHeadDim, Tiles::kBlockKeys, Tiles::kThreads, 1>(
        memory + Tiles::kKeyTileBytes, arguments.v + value_offset, value_stride, seq - first_key,
        values);

    // Start at the last queries, which see all keys, so that concurrent CTAs read the same rows.
    const int first_tile = first_tile_of_work<kHeadDim, kPart>(arguments, work, causal);
    const int last_query =
        kWindows ? min(seq - 1, last_seeing(first_key + Tiles::kBlockKeys - 1)) : seq - 1;
    int tile = last_query / Tiles::kStageQueries;
    uint32 in_group = 0;
    int slot = 0;
    copy_queries<kHeadDim, kPadded, kExtended>(arguments, stage_memory, work, tile, in_group);
    cp_async_commit();

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_row = warp * kM * 16;
    const int own_warp_key = first_key + warp_row;
    const uint32 own_keys = summed_address<kHeadDim>(memory + warp_row * kRowBytes, lane);
    const float scale_log2 = arguments.scale_log2;

    float dk[kM][kHeadDim / 8][4];
    float dv[kM][kValueElements / 8][4];
    set_zero(dk);
    set_zero(dv);
#pragma unroll 1
    while (tile >= (kAnew ? first_tile_of_work<kHeadDim, kPart>(arguments, work, causal)
                          : first_tile)) {
        cp_async_wait<0>();
        __syncthreads();
        const int this_tile = tile;
        const int this_slot = slot;
        if (++in_group == group) {
            in_group = 0;
            --tile;
        }
        slot ^= 1;
        if (tile >= (kAnew ? first_tile_of_work<kHeadDim, kPart>(arguments, work, causal)
                           : first_tile)) {
            copy_queries<kHeadDim, kPadded, kExtended>(
                arguments, stage_memory + slot * Tiles::kQueriesBytes, work, tile, in_group);
        }
        cp_async_commit();

        const uint32 stage = stage_memory + this_slot * Tiles::kQueriesBytes;
        const uint32 stage_columns = columns_address<kHeadDim>(stage, lane);
        const uint32 stage_summed = summed_address<kHeadDim>(stage, lane);
        const uint8* statistics = shared_memory + 2 * Tiles::kKeyTileBytes +
                                  this_slot * Tiles::kQueriesBytes +
                                  2 * Tiles::kQueryStageBytes;
#pragma unroll 1
        for (int chunk = 0; chunk < Tiles::kStageQueries; chunk += Tiles::kChunkQueries) {
            constexpr bool kAllAnew = kHeadDim > 128;
            const int thread = static_cast<int>(kAllAnew ? opaque(threadIdx.x) : threadIdx.x);
            const int lane_of_mask = kAllAnew ? thread % 32 : lane;
            const int row_here = kAllAnew ? thread / 32 * kM * 16 : warp_row;
            const int warp_key = kAnew ? work->first_row + row_here : own_warp_key;
            const int first_query = this_tile * Tiles::kStageQueries + chunk;
            // Queries beyond the sequence, or before all keys of this warp.
            if (first_query >= seq ||
                (causal && first_query + Tiles::kChunkQueries <= warp_key)) {
                continue;
            }
            if (kPart && (warp_key >= arguments.part.keys ||
                          first_query + Tiles::kChunkQueries <= arguments.part.first_query)) {
                continue;
            }
            // Windows or documents of these queries begin after all keys of this warp.
            if (kWindows && first_query > last_seeing(warp_key + 16 * kM - 1)) {
                continue;
            }
            uint32 columns = stage_columns + chunk * kRowBytes;
            uint32 summed = stage_summed + chunk * kRowBytes;
            uint32 keys = own_keys;
            if constexpr (kAnew) {
                const uint32 lane_here = opaque(lane);
                columns = columns_address<kHeadDim>(stage + chunk * kRowBytes, lane_here);
                summed = summed_address<kHeadDim>(stage + chunk * kRowBytes, lane_here);
                keys = summed_address<kHeadDim>(memory + warp_row * kRowBytes, lane_here);
            }
            float p[kM][2 * kN][4];
            multiply_rows<kHeadDim, kM, kN>(p, keys, columns);
            if ((causal && first_query < warp_key + 16 * kM - 1) ||
                (kPart && (warp_key + 16 * kM > arguments.part.keys ||
                           first_query < arguments.part.first_query)) ||
                (kWindows &&
                 first_query + Tiles::kChunkQueries - 1 > last_seeing(warp_key))) {
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    int last[2] = {0, 0};
                    int first[2] = {0, 0};
                    if constexpr (kWindows || kPart) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int key = warp_key + 16 * m + lane_of_mask / 4 + 8 * half;
                            if constexpr (kWindows) {
                                last[half] = last_seeing(key);
                            }
                            if constexpr (kPart) {
                                first[half] = arguments.part.first_seeing(key, causal);
                            }
                        }
                    }
#pragma unroll
                    for (int n = 0; n < 2 * kN; ++n) {
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const int key =
                                warp_key + 16 * m + lane_of_mask / 4 + e / 2 * 8;
                            const int query =
                                first_query + 8 * n + lane_of_mask % 4 * 2 + e % 2;
                            if (kPart ? query < first[e / 2]
                                      : (!kWindows || causal) && key > query) {
                                p[m][n][e] = minus_infinity();
                            }
                            if (kWindows && query > last[e / 2]) {
                                p[m][n][e] = minus_infinity();
                            }
                        }
                    }
                }
            }
            float ds[kM][2 * kN][4];
            multiply_rows<kHeadDim, kM, kN, kValueElements>(ds, keys + Tiles::kKeyTileBytes,
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
                add_weighted_rows<kHeadDim, kM, kValueElements>(
                    dv, left, summed + Tiles::kQueryStageBytes, block);
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

    if constexpr (kPart) {
        // If no query sees the keys, the loop has not waited for the copies.
        cp_async_wait<0>();
    }
    float scales[kM][2];
    float ones[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
        scales[m][0] = scales[m][1] = arguments.scale;
        ones[m][0] = ones[m][1] = 1.0f;
    }
    // Only this warp reads its keys and values, and all its reads are done.
    const int rows_left = seq - work->first_row - warp_row;
    const uint64 to = work->own_offset + static_cast<uint64>(warp_row) * key_stride;
    uint8* const own = shared_memory + warp_row * kRowBytes;
    write_head_rows<kHeadDim, kM>(dk, scales, own, arguments.dk + to, key_stride, rows_left,
                                  width);
    const uint64 values_to =
        kExtended ? work->own_value_offset + static_cast<uint64>(warp_row) * value_stride : to;
    write_head_rows<kHeadDim, kM, kValueElements>(dv, ones, own + Tiles::kKeyTileBytes,
                                                  arguments.dv + values_to, value_stride,
                                                  rows_left, values);
}
