// Attention forward of a tile of queries. The kernels of attention.cu and attention_part.cu
// instantiate this for either result type.
#pragma once

#include "common/infinity.cuh"
#include "common/opaque.cuh"
#include "common/seen_keys.cuh"
#include "common/seen_part.cuh"
#include "common/types.cuh"
#include "scheduler/attention_order.cuh"
#include "layout/head_tile.cuh"
#include "mma/head_mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/exp2.cuh"
#include "ptx/special_register.cuh"

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
// Blocks of 16 queries per warp.
constexpr int kM = 2;
constexpr int kBlockM = kWarps * kM * 16;
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2E = 1.4426950408889634f;
// Limit, in powers of two, by which a scaled score may exceed the reference of its row.
constexpr float kMargin = 8.0f;
constexpr float kLeast = -3.4028234663852886e38f;

template <int kHeadDim>
struct Tiling {
    // Keys per stage. With heads of 192 elements, shared memory does not hold the queries and
    // two stages of 64 keys.
    static constexpr int kStageKeys = kHeadDim > 128 ? 32 : 64;
    // Keys between two checks of the maxima. With heads of 128 elements the queries do not fit in
    // registers, and rereading them pays only for wider chunks.
    static constexpr int kChunkKeys = kHeadDim == 128 ? 64 : 32;
    static constexpr bool kQueriesInRegisters = kHeadDim < 128;
    // Padded kernels need registers for the width as well.
    static constexpr int blocks_per_sm(bool padded) {
        return kHeadDim == 128 || padded ? 2 : 3;
    }

    // Shared memory: queries, keys of both stages, values of both, and offsets of keys and values.
    static constexpr int kQueryBytes = kBlockM * HeadTile<kHeadDim>::kRowBytes;
    static constexpr int kKeyBytes = kStageKeys * HeadTile<kHeadDim>::kRowBytes;
    static constexpr int kKeptAt = kQueryBytes + 4 * kKeyBytes;
    static constexpr int kSharedBytes = kKeptAt + 16;
    static_assert(kSharedBytes <= 99 * 1024, "what a CTA of sm_120 may have");
};

template <typename Out>
struct Arguments {
    const bf16* q;
    const bf16* k;
    const bf16* v;
    Out* out;
    float* lse;
    uint32 seq;
    uint32 heads;
    uint32 kv_heads;
    uint32 batch_heads;    // batch * heads
    uint32 section_heads;  // see scheduler/attention_order.cuh
    uint32 causal;
    float scale_log2;  // scale * log2(e), positive
    uint32 head_dim;   // see head_width
    // Of extended kernels.
    uint32 value_dim;
    uint32 window;       // at most the keys of a sequence; equal to them if there is no window
    const float* sinks;  // [heads], or null
    const int32* documents;  // [batch * seq, 2], or null
    SeenPart part;           // of kernels for a part of the keys
};

// Softmax state of a thread's rows: l / 4 and l / 4 + 8 of each block of 16.
struct Rows {
    float reference[kM][2];  // scaled and finite; the least FP32 before a score exceeds -inf
    float sum[kM][2];        // of this thread's weights, 2^(scaled score - reference)
};

// Raises the references to the maximum scores and rescales the sums.
template <int kWidth>
__device__ __forceinline__ void raise(Rows& rows, float (&sums)[kM][kWidth / 8][4],
                                      const float (&greatest)[kM][2], float scale_log2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = greatest[m][half];
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float reference = fmaxf(top * scale_log2, rows.reference[m][half]);
            const float factor = ex2(rows.reference[m][half] - reference);
            rows.reference[m][half] = reference;
            rows.sum[m][half] *= factor;
#pragma unroll
            for (int n = 0; n < kWidth / 8; ++n) {
                sums[m][n][2 * half] *= factor;
                sums[m][n][2 * half + 1] *= factor;
            }
        }
    }
}

__device__ __forceinline__ uint32 tiles_of(uint32 seq) {
    return (seq + kBlockM - 1) / kBlockM;
}

// Position of a CTA.
struct Place {
    int first_query;      // in its sequence
    uint32 batch_head;    // batch * heads + head
    uint64 query_offset;  // elements to the head's part of the first query in q
    uint64 key_offset;    // elements to the key head's part of the sequence in k
    uint64 out_offset;    // the same for out and v
    uint64 value_offset;
    uint32 head;
    uint32 first_token;  // of its sequence, in the batch
};

template <bool kPart, typename Out>
__device__ __forceinline__ int first_seen(const Arguments<Out>& arguments, uint32 first_token,
                                          int query) {
    if constexpr (kPart) {
        return arguments.part.first_in_window(query, static_cast<int32>(arguments.seq));
    }
    const SeenKeys seen_keys{arguments.documents, static_cast<int32>(arguments.seq),
                             static_cast<int32>(arguments.window)};
    return seen_keys.first_seen(first_token, query);
}

// Returns the number of elements of a value in global memory.
template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ uint32 value_width(const Arguments<Out>& arguments) {
    return kExtended ? arguments.value_dim : head_width<kHeadDim, kPadded>(arguments.head_dim);
}

template <int kHeadDim, bool kPadded, bool kExtended, typename Out>
__device__ __forceinline__ Place place_of(uint32 cta, uint32 tiles,
                                          const Arguments<Out>& arguments) {
    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const HeadTileIndex index =
        head_tile_at(cta, tiles, arguments.batch_heads, arguments.section_heads);
    const uint32 batch = index.head / arguments.heads;
    const uint32 head = index.head - batch * arguments.heads;
    const uint32 kv_head = head / (arguments.heads / arguments.kv_heads);
    // The last queries see the most keys.
    const uint32 tile = arguments.causal != 0 ? tiles - 1 - index.tile : index.tile;
    const uint64 first_token = static_cast<uint64>(batch) * arguments.seq;
    Place place;
    place.first_query = tile * kBlockM;
    place.batch_head = index.head;
    const uint32 values = value_width<kHeadDim, kPadded, kExtended>(arguments);
    const uint64 query_row = (first_token + tile * kBlockM) * arguments.heads + head;
    const uint64 key_row = first_token * arguments.kv_heads + kv_head;
    place.query_offset = query_row * width;
    place.key_offset = key_row * width;
    place.out_offset = query_row * values;
    place.value_offset = key_row * values;
    place.head = head;
    place.first_token = batch * arguments.seq;
    return place;
}

// `kPart`: queries see a part of these keys, see common/seen_part.cuh.
template <int kHeadDim, bool kPadded, bool kExtended, bool kPart, typename Out>
__device__ __forceinline__ void attend(const Arguments<Out>& arguments) {
    using Tiles = Tiling<kHeadDim>;
    constexpr int kN = Tiles::kChunkKeys / 16;
    constexpr int kRowBytes = HeadTile<kHeadDim>::kRowBytes;
    constexpr int kStageKeys = Tiles::kStageKeys;
    constexpr int kValueElements = HeadTile<kHeadDim>::kValueElements;
    // Kernels for a part of the keys support no documents.
    constexpr bool kWindows = kExtended;
    extern __shared__ __align__(1024) uint8 shared_memory[];

    const uint32 tiles = tiles_of(arguments.seq);
    if (blockIdx.x >= tiles * arguments.batch_heads) {
        return;
    }
    const Place place = place_of<kHeadDim, kPadded, kExtended>(blockIdx.x, tiles, arguments);
    const int first_query = place.first_query;
    const int seq = arguments.seq;
    const bool causal = arguments.causal != 0;
    // Number of keys that a query sees; earlier queries see no more keys.
    const auto keys_of = [&](int last_query) {
        const int seen = causal ? min(seq, last_query + 1) : seq;
        return kPart ? arguments.part.seen(last_query, seen) : seen;
    };
    const int keys_seen = keys_of(first_query + kBlockM - 1);

    const uint32 width = head_width<kHeadDim, kPadded>(arguments.head_dim);
    const uint32 query_stride = arguments.heads * width;
    const uint32 key_stride = arguments.kv_heads * width;
    // First key of the first stage with a key that any query of the tile sees.
    const uint32 first_token = kWindows ? place.first_token : 0;
    const int first_stage =
        kWindows ? max(0, first_seen<kPart>(arguments, first_token, first_query)) / kStageKeys *
                        kStageKeys
                  : 0;

    const uint32 queries = shared_address(shared_memory);
    const uint32 keys = queries + Tiles::kQueryBytes;
    // Loads the stage at `first_key` of a key head at `key_offset`, and its values at
    // `value_offset`.
    const auto copy_stage = [&](int first_key, uint64 key_offset, uint64 value_offset) {
        const uint32 target = keys + first_key % (2 * kStageKeys) * kRowBytes;
        const uint64 from = key_offset + static_cast<uint64>(first_key) * key_stride;
        copy_head_tile<kHeadDim, kStageKeys, kThreads>(target, arguments.k + from, key_stride,
                                                       seq - first_key, width);
        const uint32 values = value_width<kHeadDim, kPadded, kExtended>(arguments);
        const uint32 value_stride = arguments.kv_heads * values;
        const uint64 values_from =
            kExtended ? value_offset + static_cast<uint64>(first_key) * value_stride : from;
        copy_head_tile<kHeadDim, kStageKeys, kThreads>(target + 2 * Tiles::kKeyBytes,
                                                       arguments.v + values_from, value_stride,
                                                       seq - first_key, values);
    };

    copy_head_tile<kHeadDim, kBlockM, kThreads>(queries, arguments.q + place.query_offset,
                                                query_stride, seq - first_query, width);
    cp_async_commit();
    copy_stage(first_stage, place.key_offset, place.value_offset);
    cp_async_commit();
    // Kept in shared memory: too few registers to hold the offsets until the next copy.
    volatile uint64* const kept_offsets =
        reinterpret_cast<uint64*>(shared_memory + Tiles::kKeptAt);
    if (threadIdx.x == 0) {
        kept_offsets[0] = place.key_offset;
        if constexpr (kExtended) {
            kept_offsets[1] = place.value_offset;
        }
    }

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int warp_query = first_query + warp * kM * 16;
    const uint32 warp_queries =
        summed_address<kHeadDim>(queries + warp * kM * 16 * kRowBytes, lane);

    uint32 query_words[kM][Tiles::kQueriesInRegisters ? kHeadDim / 16 : 1][4];
    if constexpr (Tiles::kQueriesInRegisters) {
        cp_async_wait<1>();
        __syncthreads();
        load_left<kHeadDim, kM>(query_words, warp_queries);
    }

    Rows rows;
    float sums[kM][kValueElements / 8][4];
    set_zero(sums);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            rows.reference[m][half] = kLeast;
            rows.sum[m][half] = 0.0f;
        }
    }

    const float scale_log2 = arguments.scale_log2;
#pragma unroll 1
    for (int key = first_stage; key < keys_seen; key += Tiles::kChunkKeys) {
        if (key % kStageKeys == 0) {
            // The copies are visible to all threads, and all threads have read the other stage.
            cp_async_wait<0>();
            __syncthreads();
            if (key + kStageKeys < keys_seen) {
                copy_stage(key + kStageKeys, kept_offsets[0], kExtended ? kept_offsets[1] : 0);
            }
            cp_async_commit();
        }
        // Number of keys that at least one query, and that all queries of this warp see.
        const int query_here = static_cast<int>(opaque(warp_query));
        const int some_see = keys_of(query_here + kM * 16 - 1);
        const int all_see = keys_of(query_here);
        if (key >= some_see || query_here >= seq) {
            continue;
        }
        // The chunk precedes the windows or documents of all queries of this warp.
        if (kWindows &&
            key + Tiles::kChunkKeys <= first_seen<kPart>(arguments, first_token, query_here)) {
            continue;
        }
        const uint32 chunk_keys = keys + key % (2 * kStageKeys) * kRowBytes;
        const uint32 lane_here = Tiles::kQueriesInRegisters ? lane : opaque(lane);
        const uint32 key_columns = columns_address<kHeadDim>(chunk_keys, lane_here);
        float scores[kM][2 * kN][4];
        if constexpr (Tiles::kQueriesInRegisters) {
            multiply_rows<kHeadDim, kM, kN>(scores, query_words, key_columns);
        } else {
            multiply_rows<kHeadDim, kM, kN>(scores, opaque(warp_queries), key_columns);
        }
        if (key + Tiles::kChunkKeys > all_see ||
            (kWindows &&
             key < first_seen<kPart>(arguments, first_token, query_here + kM * 16 - 1))) {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // Number of keys of the chunk that the row sees, minus this thread's first
                    // column.
                    const int query = query_here + 16 * m + lane / 4 + 8 * half;
                    const int seen = keys_of(query) - key - lane % 4 * 2;
                    // Number of these keys that precede the row's window or document.
                    const int passed =
                        kWindows
                            ? first_seen<kPart>(arguments, first_token, query) - key - lane % 4 * 2
                            : 0;
#pragma unroll
                    for (int n = 0; n < 2 * kN; ++n) {
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            if (8 * n + e >= seen || (kWindows && 8 * n + e < passed)) {
                                scores[m][n][2 * half + e] = minus_infinity();
                            }
                        }
                    }
                }
            }
        }

        float greatest[kM][2];
        bool exceeds = false;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = fmaxf(scores[m][0][2 * half], scores[m][0][2 * half + 1]);
#pragma unroll
                for (int n = 1; n < 2 * kN; ++n) {
                    top = fmaxf(top, fmaxf(scores[m][n][2 * half],
                                           scores[m][n][2 * half + 1]));
                }
                greatest[m][half] = top;
                exceeds |= fmaf(top, scale_log2, -kMargin) > rows.reference[m][half];
            }
        }
        if (__any_sync(0xffffffffu, exceeds)) {
            raise<kValueElements>(rows, sums, greatest, scale_log2);
        }

        const uint32 values =
            summed_address<kHeadDim>(chunk_keys + 2 * Tiles::kKeyBytes, lane_here);
#pragma unroll
        for (int block = 0; block < kN; ++block) {
            uint32 weights[kM][4];
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                float weight[2][4];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        weight[n][e] = ex2(fmaf(scores[m][2 * block + n][e], scale_log2,
                                                -rows.reference[m][e / 2]));
                    }
                    rows.sum[m][0] += weight[n][0] + weight[n][1];
                    rows.sum[m][1] += weight[n][2] + weight[n][3];
                }
                to_left(weights[m], weight[0], weight[1]);
            }
            add_weighted_rows<kHeadDim, kM, kValueElements>(sums, weights, values, block);
        }
    }

    if (kPart && first_stage >= keys_seen) {
        // Wait for the copies of the first stage, as the loop did not run.
        cp_async_wait<0>();
    }

    const Place target = place_of<kHeadDim, kPadded, kExtended>(
        block_index_again(), tiles_of(opaque(arguments.seq)), arguments);
    // Recomputed, as is the place, to hold neither in registers through the loop.
    const int thread = static_cast<int>(opaque(threadIdx.x));
    const int warp_again = thread / 32;
    const int lane_again = thread % 32;
    const int target_query = target.first_query + warp_again * kM * 16;
    float factors[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum = rows.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            float factor = 1.0f;
            if (kExtended && arguments.sinks != nullptr) {
                const float sink = arguments.sinks[target.head] * kLog2E;
                const float raised = fmaxf(rows.reference[m][half], sink);
                factor = ex2(rows.reference[m][half] - raised);
                sum = fmaf(sum, factor, ex2(sink - raised));
                rows.reference[m][half] = raised;
            }
            factors[m][half] = factor / sum;
            if (kPart && sum == 0.0f) {
                factors[m][half] = 0.0f;
            }
            const int query = target_query + 16 * m + lane_again / 4 + 8 * half;
            if (lane_again % 4 == 0 && query < seq) {
                arguments.lse[static_cast<uint64>(target.batch_head) * seq + query] =
                    (rows.reference[m][half] + lg2(sum)) * kLn2;
            }
        }
    }
    const uint32 out_width = value_width<kHeadDim, kPadded, kExtended>(arguments);
    const uint32 out_stride = arguments.heads * out_width;
    // Only this warp reads its queries, and all its reads are done.
    write_head_rows<kHeadDim, kM, kValueElements>(
        sums, factors, shared_memory + warp_again * kM * 16 * kRowBytes,
        arguments.out + target.out_offset + static_cast<uint64>(warp_again * kM * 16) * out_stride,
        out_stride, seq - target_query, out_width);
}
