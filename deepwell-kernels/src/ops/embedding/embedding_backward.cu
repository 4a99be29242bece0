// Gradient of a token embedding: dtable[v, :] (+)= sum of dout[t, :] over tokens[t] = v.
//
// tokens [positions] i32, dout [positions, width] BF16, dtable [vocab, width] FP32.
//
// Three kernels in sequence, so that neither a frequent token nor a large table leaves most threads
// idle:
//
//   sort  The positions by token, equal tokens in their order. A CTA owns a run of table rows and
//         scans all tokens twice, to count and to place.
//   sum   The sorted positions in chunks of 64. A warp sums 128 columns of a chunk, position by
//         position, and writes each row at the row's end. A row that spans several chunks gives
//         partial sums in scratch. Other CTAs fill the rows without tokens with zeros.
//   join  Adds the partial sums of each row that spans several chunks, in an order that depends
//         only on their number.
//
// The order of all additions is that of the sorted positions and depends on nothing else. Tokens
// outside the table are in no chunk, nor is the token `padding` (-1 for none), whose row gets no
// gradient.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"

constexpr uint32 kAll = 0xffffffffu;
constexpr uint32 kNone = 0xffffffffu;

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / 32;
// Largest number of rows that a CTA owns.
constexpr int kRowsMax = 256;
constexpr int kSortInFlight = 8;

constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / 32;
constexpr uint32 kChunk = 64;
constexpr uint32 kSliceColumns = 128;
constexpr int kSumInFlight = 8;
// Rows that a warp checks for zero filling.
constexpr uint32 kZeroRows = 4;

constexpr int kJoinThreads = 128;
constexpr int kJoinWarps = kJoinThreads / 32;
constexpr uint32 kJoinInFlight = 4;

static_assert(kChunk == 64, "two positions a lane");
static_assert(kSliceColumns == 128, "four columns a lane");
static_assert(kJoinWarps == 4, "the sum at the end of a join");

__device__ __forceinline__ uint32 lanes_below() {
    return (1u << (threadIdx.x % 32)) - 1u;
}

// The token at `position`; -1 past `end` and for `padding`.
__device__ __forceinline__ int32 token_at(const int32* __restrict__ tokens, uint64 position,
                                          uint64 end, int32 padding) {
    const int32 token = position < end ? tokens[position] : -1;
    return token == padding ? -1 : token;
}

// sorted [positions]: the positions of row 0, then of row 1 and so on, each in order. firsts [vocab
// + 1]: where each row begins in `sorted`, and the end of the last row.
extern "C" __global__ void __launch_bounds__(kSortThreads)
    embedding_backward_sort(const int32* __restrict__ tokens, uint32* __restrict__ sorted,
                            uint32* __restrict__ firsts, uint32 positions, uint32 vocab,
                            uint32 rows_per_block, int32 padding) {
    // Per warp and row: the number of tokens, then the place of the next token.
    __shared__ uint32 places[kSortWarps][kRowsMax];
    __shared__ uint32 below_of_warps[kSortWarps];
    __shared__ uint32 rows_of_warps[kRowsMax / 32];
    const uint32 warp = threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
    const uint32 first_row = blockIdx.x * rows_per_block;
    const uint32 rows = first_row < vocab ? min(rows_per_block, vocab - first_row) : 0;
    for (uint32 i = threadIdx.x; i < kSortWarps * kRowsMax; i += kSortThreads) {
        (&places[0][0])[i] = 0;
    }
    __syncthreads();

    // Each warp scans a run of tokens.
    const uint64 all = positions;
    const uint64 run = (all + kSortThreads - 1) / kSortThreads * 32;
    const uint64 begin = min(warp * run, all);
    const uint64 end = min(begin + run, all);
    uint32 below = 0;  // tokens of earlier rows
    for (uint64 start = begin; start < end; start += 32 * kSortInFlight) {
        int32 ids[kSortInFlight];
#pragma unroll
        for (int k = 0; k < kSortInFlight; ++k) {
            ids[k] = token_at(tokens, start + k * 32 + lane, end, padding);
        }
#pragma unroll
        for (int k = 0; k < kSortInFlight; ++k) {
            const uint32 id = static_cast<uint32>(ids[k]);
            if (ids[k] >= 0 && id - first_row < rows) {
                atomicAdd(&places[warp][id - first_row], 1u);
            }
            below += ids[k] >= 0 && id < first_row ? 1 : 0;
        }
    }
    below = __reduce_add_sync(kAll, below);
    if (lane == 0) {
        below_of_warps[warp] = below;
    }
    __syncthreads();

    // One thread per row: the row's tokens before each warp, then the tokens of earlier rows.
    const bool has_row = threadIdx.x < kRowsMax;
    uint32 of_row = 0;
    uint32 before = 0;
    if (has_row) {
#pragma unroll 8
        for (int other = 0; other < kSortWarps; ++other) {
            const uint32 count = places[other][threadIdx.x];
            places[other][threadIdx.x] = of_row;
            of_row += count;
        }
        before = of_row;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const uint32 other = __shfl_up_sync(kAll, before, distance);
            before += lane >= distance ? other : 0;
        }
        if (lane == 31) {
            rows_of_warps[warp] = before;
        }
        before -= of_row;
    }
    __syncthreads();
    if (has_row) {
        for (uint32 other = 0; other < warp; ++other) {
            before += rows_of_warps[other];
        }
#pragma unroll 8
        for (int other = 0; other < kSortWarps; ++other) {
            before += below_of_warps[other];
        }
#pragma unroll 8
        for (int other = 0; other < kSortWarps; ++other) {
            places[other][threadIdx.x] += before;
        }
        if (threadIdx.x < rows) {
            firsts[first_row + threadIdx.x] = before;
            if (first_row + threadIdx.x + 1 == vocab) {
                firsts[vocab] = before + of_row;
            }
        }
    }
    if (vocab == 0 && threadIdx.x == 0) {
        firsts[0] = 0;
    }
    __syncthreads();

    for (uint64 start = begin; start < end; start += 32 * kSortInFlight) {
        int32 ids[kSortInFlight];
#pragma unroll
        for (int k = 0; k < kSortInFlight; ++k) {
            ids[k] = token_at(tokens, start + k * 32 + lane, end, padding);
        }
#pragma unroll
        for (int k = 0; k < kSortInFlight; ++k) {
            const uint32 row = static_cast<uint32>(ids[k]) - first_row;
            const bool mine = ids[k] >= 0 && row < rows;
            if (__ballot_sync(kAll, mine) == 0) {
                continue;
            }
            const uint32 those = __match_any_sync(kAll, mine ? row : kNone);
            const uint32 ahead = __popc(those & lanes_below());
            const uint32 place = mine ? places[warp][row] : 0;
            __syncwarp();
            if (mine) {
                sorted[place + ahead] = static_cast<uint32>(start + k * 32 + lane);
                if (ahead == 0) {
                    places[warp][row] = place + __popc(those);
                }
            }
            __syncwarp();
        }
    }
}

// The four columns of a lane in a slice of 128: neighbours, or 32 apart if the width is not a
// multiple of four.
template <bool kVector>
struct Columns {
    uint32 first;
    uint32 width;

    __device__ __forceinline__ Columns(uint32 slice, uint32 width)
        : first(slice * kSliceColumns + threadIdx.x % 32 * (kVector ? 4 : 1)), width(width) {}

    __device__ __forceinline__ bool has(int j) const {
        return kVector ? first < width : first + 32 * j < width;
    }

    // Four BF16 as two words.
    __device__ __forceinline__ uint2 load(const bf16* row) const {
        if constexpr (kVector) {
            return has(0) ? *reinterpret_cast<const uint2*>(row + first) : make_uint2(0, 0);
        } else {
            uint32 bits[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                bits[j] = has(j) ? row[first + 32 * j].bits : 0;
            }
            return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        }
    }

    __device__ __forceinline__ float4 load(const float* row) const {
        if constexpr (kVector) {
            return has(0) ? *reinterpret_cast<const float4*>(row + first)
                          : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        } else {
            return make_float4(has(0) ? row[first] : 0.0f, has(1) ? row[first + 32] : 0.0f,
                               has(2) ? row[first + 64] : 0.0f, has(3) ? row[first + 96] : 0.0f);
        }
    }

    __device__ __forceinline__ void store(float* row, float4 values) const {
        if constexpr (kVector) {
            if (has(0)) {
                *reinterpret_cast<float4*>(row + first) = values;
            }
        } else {
            if (has(0)) row[first] = values.x;
            if (has(1)) row[first + 32] = values.y;
            if (has(2)) row[first + 64] = values.z;
            if (has(3)) row[first + 96] = values.w;
        }
    }
};

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Adds four BF16 to four sums.
__device__ __forceinline__ void add_to(float4& sums, uint2 values) {
    sums = sum_of(sums, make_float4(low_to_f32(values.x), high_to_f32(values.x),
                                    low_to_f32(values.y), high_to_f32(values.y)));
}

// Shared by `sum` and `join`. A chunk has two partial sums in scratch: of its first row, if this
// row began in an earlier chunk, and of its last row, if this row begins here and continues. spans
// [chunks] is the latter row, or `kNone`.
struct Sums {
    const uint32* firsts;
    float* dtable;
    float* partials;  // [chunks, 2, width]
    uint32* spans;
    uint32 vocab;
    uint32 width;
    bool accumulate;

    __device__ __forceinline__ float* partial(uint64 chunk, uint32 which) const {
        return partials + (2 * chunk + which) * width;
    }

    template <bool kVector>
    __device__ __forceinline__ void store_row(const Columns<kVector>& columns, uint32 row,
                                              float4 sums) const {
        float* const target = dtable + static_cast<uint64>(row) * width;
        columns.store(target, accumulate ? sum_of(columns.load(target), sums) : sums);
    }
};

// Sums the positions of a chunk.
template <bool kVector>
__device__ __forceinline__ void sum_chunk(const Sums& to, const int32* __restrict__ tokens,
                                          const bf16* __restrict__ dout,
                                          const uint32* __restrict__ sorted, uint64 chunk,
                                          uint32 slice) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 total = to.firsts[to.vocab];
    const uint64 begin = chunk * kChunk;
    if (begin >= total) {
        if (slice == 0 && lane == 0) {
            to.spans[chunk] = kNone;
        }
        return;
    }
    const uint32 count = min(static_cast<uint64>(kChunk), total - begin);
    // Lane l has positions l and l + 32 of the chunk, with their rows.
    uint32 low = 0, high = 0, low_row = 0, high_row = 0;
    if (lane < count) {
        low = sorted[begin + lane];
    }
    if (lane + 32 < count) {
        high = sorted[begin + lane + 32];
    }
    if (lane < count) {
        low_row = static_cast<uint32>(tokens[low]);
    }
    if (lane + 32 < count) {
        high_row = static_cast<uint32>(tokens[high]);
    }
    uint32 row = __shfl_sync(kAll, low_row, 0);
    const uint32 last_row = __shfl_sync(kAll, count > 32 ? high_row : low_row, (count - 1) % 32);
    const bool began_before = to.firsts[row] < begin;
    const bool goes_on = to.firsts[last_row + 1] > begin + count;

    const Columns<kVector> columns(slice, to.width);
    bool partial = began_before;  // of the current row
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
    for (uint32 start = 0; start < count; start += kSumInFlight) {
        const uint32 positions = start < 32 ? low : high;
        const uint32 rows = start < 32 ? low_row : high_row;
        uint2 values[kSumInFlight];
#pragma unroll
        for (uint32 k = 0; k < kSumInFlight; ++k) {
            const uint32 position = __shfl_sync(kAll, positions, (start + k) % 32);
            if (start + k < count) {
                values[k] = columns.load(dout + static_cast<uint64>(position) * to.width);
            }
        }
#pragma unroll
        for (uint32 k = 0; k < kSumInFlight; ++k) {
            const uint32 next = __shfl_sync(kAll, rows, (start + k) % 32);
            if (start + k < count) {
                if (next != row) {
                    if (partial) {
                        columns.store(to.partial(chunk, 0), sums);
                    } else {
                        to.store_row(columns, row, sums);
                    }
                    partial = false;
                    row = next;
                    sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                }
                add_to(sums, values[k]);
            }
        }
    }
    const bool spans = !partial && goes_on;
    if (partial || spans) {
        columns.store(to.partial(chunk, spans ? 1 : 0), sums);
    } else {
        to.store_row(columns, row, sums);
    }
    if (slice == 0 && lane == 0) {
        to.spans[chunk] = spans ? row : kNone;
    }
}

// Fills rows without tokens with zeros.
template <bool kVector>
__device__ __forceinline__ void fill_rows(const Sums& to, uint64 first_row) {
    const uint32 lane = threadIdx.x % 32;
    const uint64 row = first_row + lane;
    const uint32 first = to.firsts[row < to.vocab ? row : to.vocab];
#pragma unroll
    for (uint32 k = 0; k < kZeroRows; ++k) {
        const uint32 begin = __shfl_sync(kAll, first, k);
        const uint32 end = __shfl_sync(kAll, first, k + 1);
        if (first_row + k < to.vocab && begin == end) {
            float* const target = to.dtable + (first_row + k) * to.width;
            for (uint32 slice = 0; slice * kSliceColumns < to.width; ++slice) {
                Columns<kVector>(slice, to.width)
                    .store(target, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
            }
        }
    }
}

// In the first CTAs each warp has a chunk and slice, with the slices of a chunk side by side; the
// other CTAs fill rows, unless sums are accumulated.
template <bool kVector>
__device__ __forceinline__ void sum_or_fill(const Sums& to, const int32* __restrict__ tokens,
                                            const bf16* __restrict__ dout,
                                            const uint32* __restrict__ sorted, uint32 items,
                                            uint32 slices) {
    const uint32 sum_blocks = items / kSumWarps + (items % kSumWarps != 0 ? 1 : 0);
    const uint32 warp = threadIdx.x / 32;
    if (blockIdx.x < sum_blocks) {
        const uint32 item = blockIdx.x * kSumWarps + warp;
        if (item < items) {
            sum_chunk<kVector>(to, tokens, dout, sorted, item / slices, item % slices);
        }
    } else if (!to.accumulate) {
        const uint64 warps = static_cast<uint64>(blockIdx.x - sum_blocks) * kSumWarps + warp;
        fill_rows<kVector>(to, warps * kZeroRows);
    }
}

// One CTA per chunk and slice.
template <bool kVector>
__device__ __forceinline__ void join(const Sums& to, uint32 slices) {
    __shared__ float4 of_warps[kJoinWarps][32];
    const uint64 chunk = blockIdx.x / slices;
    const uint32 row = to.spans[chunk];
    if (row == kNone) {
        return;
    }
    const uint32 warp = threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
    const Columns<kVector> columns(blockIdx.x % slices, to.width);
    const uint64 last_chunk = (to.firsts[row + 1] - 1u) / kChunk;
    const uint32 count = static_cast<uint32>(last_chunk - chunk) + 1;
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32 start = warp; start < count; start += kJoinWarps * kJoinInFlight) {
        float4 values[kJoinInFlight];
#pragma unroll
        for (uint32 k = 0; k < kJoinInFlight; ++k) {
            const uint32 index = start + k * kJoinWarps;
            if (index < count) {
                values[k] = columns.load(to.partial(chunk + index, index == 0 ? 1 : 0));
            }
        }
#pragma unroll
        for (uint32 k = 0; k < kJoinInFlight; ++k) {
            if (start + k * kJoinWarps < count) {
                sums = sum_of(sums, values[k]);
            }
        }
    }
    of_warps[warp][lane] = sums;
    __syncthreads();
    if (warp == 0) {
        const float4 a = sum_of(of_warps[0][lane], of_warps[1][lane]);
        const float4 b = sum_of(of_warps[2][lane], of_warps[3][lane]);
        to.store_row(columns, row, sum_of(a, b));
    }
}

// For widths that are multiples of 4; all pointers 16-byte aligned. items: chunks * slices.
extern "C" __global__ void __launch_bounds__(kSumThreads)
    embedding_backward_sum_vector(const int32* __restrict__ tokens, const bf16* __restrict__ dout,
                                  float* dtable, const uint32* __restrict__ sorted,
                                  const uint32* __restrict__ firsts, float* partials,
                                  uint32* spans, uint32 vocab, uint32 width, uint32 items,
                                  uint32 slices, uint32 accumulate) {
    const Sums to{firsts, dtable, partials, spans, vocab, width, accumulate != 0};
    sum_or_fill<true>(to, tokens, dout, sorted, items, slices);
}

// For any width.
extern "C" __global__ void __launch_bounds__(kSumThreads)
    embedding_backward_sum_scalar(const int32* __restrict__ tokens, const bf16* __restrict__ dout,
                                  float* dtable, const uint32* __restrict__ sorted,
                                  const uint32* __restrict__ firsts, float* partials,
                                  uint32* spans, uint32 vocab, uint32 width, uint32 items,
                                  uint32 slices, uint32 accumulate) {
    const Sums to{firsts, dtable, partials, spans, vocab, width, accumulate != 0};
    sum_or_fill<false>(to, tokens, dout, sorted, items, slices);
}

// For widths that are multiples of 4; all pointers 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kJoinThreads)
    embedding_backward_join_vector(float* dtable, const uint32* __restrict__ firsts,
                                   float* partials, uint32* spans, uint32 vocab, uint32 width,
                                   uint32 slices, uint32 accumulate) {
    join<true>(Sums{firsts, dtable, partials, spans, vocab, width, accumulate != 0}, slices);
}

// For any width.
extern "C" __global__ void __launch_bounds__(kJoinThreads)
    embedding_backward_join_scalar(float* dtable, const uint32* __restrict__ firsts,
                                   float* partials, uint32* spans, uint32 vocab, uint32 width,
                                   uint32 slices, uint32 accumulate) {
    join<false>(Sums{firsts, dtable, partials, spans, vocab, width, accumulate != 0}, slices);
}
