// Gradient of a token embedding: dtable[v, :] (+)= sum of dout[t, :] over tokens[t] = v.
//
// tokens [positions] i32, dout [positions, width] BF16, dtable [vocab, width] FP32.
//
// A block owns `rows_per_block` rows of the table and a slice of 256 columns, so that a frequent
// token is the work of width / 256 blocks. It looks through all tokens (they stay in the L1),
// lists the positions of its own in order, sorts the list by row without changing that order, and
// adds up. A warp owns 32 columns: four lanes read 64 bytes of a position, and the eight groups
// of four lanes take eight rows at a time, or all one row when that has many positions. In a list
// a row is added in the order of its tokens, or as eight interleaved sums that a fixed tree joins.
// When the list is full its sums go to the table, and the next ones are added there. Nothing
// depends on the order of blocks. A token that is not in the table is in no list.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSliceColumns = 256;
constexpr int kWarpColumns = kSliceColumns / kWarps;
constexpr int kLaneColumns = 8;
constexpr int kGroupLanes = kWarpColumns / kLaneColumns;
constexpr int kGroups = 32 / kGroupLanes;
constexpr int kRowsMax = 64;
// Tokens that the block looks at between two barriers, and room of the list.
constexpr int kTile = 2048;
constexpr int kTokensPerLane = kTile / kThreads;
// Positions of a row that one group adds alone.
constexpr uint32 kAloneMax = 32;

static_assert(kTokensPerLane == 8, "two loads of four tokens");
static_assert(kGroups == 8 && kGroupLanes == 4, "the shuffles below join eight groups");

struct List {
    uint32 positions[kTile];  // in the order of the tokens
    uint32 sorted[kTile];     // by row, then in that order
    uint8 rows[kTile];        // of positions, counted from the block's first
    uint32 counts[kRowsMax];
    uint32 firsts[kRowsMax];  // into sorted
    uint32 found[2][kWarps];
};

// What a block works on.
struct Work {
    const bf16* dout;
    float* dtable;
    uint64 first_row;
    uint32 rows;
    uint32 width;
    uint32 column;  // first of this lane
};

__device__ __forceinline__ uint32 lanes_below() {
    return (1u << (threadIdx.x % 32)) - 1u;
}

// Counts the list's rows and sorts it by them.
__device__ __forceinline__ void sort_list(List& list, uint32 length, uint32 rows) {
    const uint32 warp = threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
    if (threadIdx.x < kRowsMax) {
        list.counts[threadIdx.x] = 0;
    }
    __syncthreads();
    for (uint32 i = threadIdx.x; i < length; i += kThreads) {
        atomicAdd(&list.counts[list.rows[i]], 1u);
    }
    __syncthreads();
    if (threadIdx.x < rows) {
        uint32 first = 0;
        for (uint32 row = 0; row < threadIdx.x; ++row) {
            first += list.counts[row];
        }
        list.firsts[threadIdx.x] = first;
    }
    __syncthreads();
    for (uint32 row = warp; row < rows; row += kWarps) {
        if (list.counts[row] == 0) {
            continue;
        }
        uint32 next = list.firsts[row];
        for (uint32 start = 0; start < length; start += 32) {
            const uint32 i = start + lane;
            const bool mine = i < length && list.rows[i] == row;
            const uint32 those = __ballot_sync(0xffffffffu, mine);
            if (mine) {
                list.sorted[next + __popc(those & lanes_below())] = list.positions[i];
            }
            next += __popc(those);
        }
    }
    __syncthreads();
}

template <bool kVector>
__device__ __forceinline__ void load_columns(const Work& work, uint32 position,
                                             float (&values)[kLaneColumns]) {
    const bf16* source = work.dout + static_cast<uint64>(position) * work.width + work.column;
    if constexpr (kVector) {
        unpack_bf16x8(*reinterpret_cast<const uint4*>(source), values);
    } else {
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
            values[j] = work.column + j < work.width ? to_f32(source[j]) : 0.0f;
        }
    }
}

// Adds every `step`-th position of sorted[begin, end), in order, several loads in flight.
template <bool kVector>
__device__ __forceinline__ void add_positions(const Work& work, const uint32* sorted, uint32 begin,
                                              uint32 end, uint32 step,
                                              float (&sums)[kLaneColumns]) {
    constexpr int kInFlight = kVector ? 4 : 2;
    for (uint32 i = begin; i < end; i += kInFlight * step) {
        float values[kInFlight][kLaneColumns] = {};
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (i + k * step < end) {
                load_columns<kVector>(work, sorted[i + k * step], values[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (i + k * step < end) {
#pragma unroll
                for (int j = 0; j < kLaneColumns; ++j) {
                    sums[j] += values[k][j];
                }
            }
        }
    }
}

template <bool kVector>
__device__ __forceinline__ void store_columns(const Work& work, uint32 row, bool add,
                                              const float (&sums)[kLaneColumns]) {
    float* target = work.dtable + (work.first_row + row) * work.width + work.column;
    if constexpr (kVector) {
#pragma unroll
        for (int j = 0; j < kLaneColumns; j += 4) {
            float4 sum = make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
            if (add) {
                const float4 old = *reinterpret_cast<const float4*>(target + j);
                sum = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
            }
            *reinterpret_cast<float4*>(target + j) = sum;
        }
    } else {
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
            if (work.column + j < work.width) {
                target[j] = add ? target[j] + sums[j] : sums[j];
            }
        }
    }
}

// Adds up the sorted list and writes its rows. With `add` they are added to the table, and rows
// without positions are left alone; else all rows are written, zeros for those.
template <bool kVector>
__device__ __forceinline__ void add_up(const Work& work, const List& list, bool add) {
    const uint32 group = threadIdx.x % 32 / kGroupLanes;
    const bool has_columns = work.column < work.width;
    for (uint32 base = 0; base < work.rows; base += kGroups) {
        const uint32 row = base + group;
        const uint32 count = row < work.rows ? list.counts[row] : 0;
        const bool alone = count <= kAloneMax;
        if (alone && has_columns && row < work.rows && (count > 0 || !add)) {
            float sums[kLaneColumns] = {};
            const uint32 first = count > 0 ? list.firsts[row] : 0;
            add_positions<kVector>(work, list.sorted, first, first + count, 1, sums);
            store_columns<kVector>(work, row, add, sums);
        }
        uint32 shared_rows = __ballot_sync(0xffffffffu, !alone);
        while (shared_rows != 0) {
            const uint32 lane = __ffs(shared_rows) - 1;
            shared_rows &= ~(((1u << kGroupLanes) - 1u) << lane);
            const uint32 shared_row = base + lane / kGroupLanes;
            const uint32 first = list.firsts[shared_row];
            const uint32 end = first + list.counts[shared_row];
            float sums[kLaneColumns] = {};
            if (has_columns) {
                add_positions<kVector>(work, list.sorted, first + group, end, kGroups, sums);
            }
#pragma unroll
            for (int distance = kGroupLanes; distance < 32; distance *= 2) {
#pragma unroll
                for (int j = 0; j < kLaneColumns; ++j) {
                    sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
                }
            }
            if (group == 0 && has_columns) {
                store_columns<kVector>(work, shared_row, add, sums);
            }
        }
    }
}

// Four tokens from `position` on; those past the end are in no table.
__device__ __forceinline__ int4 load_tokens(const int32* __restrict__ tokens, uint64 position,
                                            uint64 positions) {
    if (position + 4 <= positions) {
        return *reinterpret_cast<const int4*>(tokens + position);
    }
    int4 four = make_int4(-1, -1, -1, -1);
    if (position < positions) four.x = tokens[position];
    if (position + 1 < positions) four.y = tokens[position + 1];
    if (position + 2 < positions) four.z = tokens[position + 2];
    return four;
}

template <bool kVector>
__device__ __forceinline__ void embed_backward(const int32* __restrict__ tokens,
                                               const bf16* __restrict__ dout,
                                               float* __restrict__ dtable, uint64 positions,
                                               uint32 vocab, uint32 width, uint32 rows_per_block,
                                               uint32 slices, uint32 accumulate) {
    __shared__ List list;
    const uint32 warp = threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
    const uint32 slice = blockIdx.x % slices;
    Work work;
    work.dout = dout;
    work.dtable = dtable;
    work.first_row = static_cast<uint64>(blockIdx.x / slices) * rows_per_block;
    const uint64 left = vocab > work.first_row ? vocab - work.first_row : 0;
    work.rows = left < rows_per_block ? static_cast<uint32>(left) : rows_per_block;
    work.width = width;
    work.column = slice * kSliceColumns + warp * kWarpColumns + lane % kGroupLanes * kLaneColumns;

    bool add = accumulate != 0;
    uint32 length = 0;
    uint32 parity = 0;
    for (uint64 tile = 0; tile < positions; tile += kTile) {
        // A warp looks at 256 tokens in a row: 128, four a lane, and 128 more.
        const uint64 first = tile + warp * (kTile / kWarps) + lane * 4;
        uint32 rows[kTokensPerLane];  // of the table, from the block's first; large if not its
        uint32 mine = 0;              // bit k: token k is of this block
#pragma unroll
        for (int k = 0; k < kTokensPerLane; k += 4) {
            const int4 four = load_tokens(tokens, first + k * 32, positions);
            const int32 ids[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                rows[k + j] = static_cast<uint32>(ids[j]) - static_cast<uint32>(work.first_row);
                // A negative token is beyond every table as an unsigned number.
                mine |= (rows[k + j] < work.rows && ids[j] >= 0) ? 1u << (k + j) : 0u;
            }
        }
        const uint32 found = __reduce_add_sync(0xffffffffu, __popc(mine));
        if (lane == 0) {
            list.found[parity][warp] = found;
        }
        // The numbers of the tile before the last are overwritten: all have read them, for they
        // have passed the last tile's barrier.
        __syncthreads();
        uint32 before = 0;
        uint32 total = 0;
#pragma unroll
        for (int other = 0; other < kWarps; ++other) {
            before += other < warp ? list.found[parity][other] : 0;
            total += list.found[parity][other];
        }
        parity ^= 1;
        if (length + total > kTile) {
            sort_list(list, length, work.rows);
            add_up<kVector>(work, list, add);
            __syncthreads();
            add = true;
            length = 0;
        }
        uint32 next = length + before;
        length += total;
        if (found == 0) {
            continue;
        }
#pragma unroll
        for (int k = 0; k < kTokensPerLane; k += 4) {
            uint32 ahead = 0;
            uint32 in_section = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32 those = __ballot_sync(0xffffffffu, mine >> (k + j) & 1u);
                ahead += __popc(those & lanes_below());
                in_section += __popc(those);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (mine >> (k + j) & 1u) {
                    list.positions[next + ahead] = static_cast<uint32>(first + k * 32 + j);
                    list.rows[next + ahead] = static_cast<uint8>(rows[k + j]);
                    ++ahead;
                }
            }
            next += in_section;
        }
    }
    __syncthreads();
    sort_list(list, length, work.rows);
    add_up<kVector>(work, list, add);
}

// width is a multiple of 8; positions below 2^32; all 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    embedding_backward_vector(const int32* __restrict__ tokens, const bf16* __restrict__ dout,
                              float* __restrict__ dtable, uint64 positions, uint32 vocab,
                              uint32 width, uint32 rows_per_block, uint32 slices,
                              uint32 accumulate) {
    embed_backward<true>(tokens, dout, dtable, positions, vocab, width, rows_per_block, slices,
                         accumulate);
}

// Any width; tokens 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    embedding_backward_scalar(const int32* __restrict__ tokens, const bf16* __restrict__ dout,
                              float* __restrict__ dtable, uint64 positions, uint32 vocab,
                              uint32 width, uint32 rows_per_block, uint32 slices,
                              uint32 accumulate) {
    embed_backward<false>(tokens, dout, dtable, positions, vocab, width, rows_per_block, slices,
                          accumulate);
}
