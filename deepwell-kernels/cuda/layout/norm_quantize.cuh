// A normalization of rows and the block quantization of its output, from one read of the source.
//
// Column blocks need 32 or 128 rows of y together, and y needs the statistics of whole rows: 128
// rows at a time, a strip, then. It is more than a multiprocessor holds, so a group of blocks takes
// it, a slice of 128 columns each:
//
//   1. The slice is copied to shared memory; the block adds delta and stores the sum where there
//      is one, and sums the squares of each row (for a layer normalization first the distances from
//      the row's first element, and later the squared distances from its mean). These sums go to
//      global memory, and a counter of the group tells that they are there.
//   2. When all blocks have counted, each finishes all rows by itself: rstd, or the mean.
//   3. Each thread takes its pieces into registers, normalizes them, and they are quantized as in
//      `layout/mx_plain_tile.cuh`.
//
// A group takes strip after strip, and has always two: step 1 of the next strip comes before step 2
// of this one, so that nobody waits for sums that were only just given; and as soon as the pieces
// of this strip are in registers, the strip after the next comes in their place. Groups are not
// clusters: these leave multiprocessors idle where their number has no whole clusters, and are too
// small for long rows.
//
// The strips of a group follow each other, so that a block has the scales of eight of them, 32
// bytes of a column, before it writes them: four bytes keep the L2 cache as busy as a whole line.
//
// Blocks wait for each other, so the grid is no larger than what the device holds at a time; blocks
// of a group have neighbouring indices, and groups do not wait for each other.
//
// Sums over a row go in the order of `common/row_sum.cuh`, so that y has the bits that the
// normalization alone gives.
#pragma once

#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "layout/mx_plain_tile.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"
#include "layout/norm_value.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/release.cuh"
#include "ptx/tensor_copy.cuh"

using NormTile = MxTile<bf16>;
static_assert(kMxTile == kSlice, "slices of a row's sum are columns of a tile");
static_assert(kMxRowLanes == kSlicePieces, "sixteen threads hold a slice");

// Strips that a block has at a time.
constexpr uint32 kNormStrips = 2;
// A group begins to give sums of a strip when all have given those of the strip two before; all
// have read those of the strip four before.
constexpr uint32 kNormCounters = 2;
constexpr uint32 kNormSums = 4;
// Sums for the mean, and for rstd.
constexpr uint32 kNormKinds = 2;

// What is normalized, and where all but the quantized copies go. Matrices are [rows, columns] of
// `MxTarget`; columns are a multiple of 8.
struct NormOperands {
    const bf16* x;
    const bf16* delta;   // with a sum before
    const bf16* weight;  // [columns]
    const bf16* bias;    // [columns], of a layer normalization
    bf16* sum;           // with a sum before
    bf16* y;             // null where nobody else reads it
    float* mean;         // [rows], of a layer normalization
    float* rstd;         // [rows]
    float eps;
};

// How blocks find each other.
struct NormGroup {
    float* sums;       // [groups, kNormKinds, kNormSums, slices, 128]
    uint32* counters;  // [groups, kNormKinds, kNormCounters], zero before and after
};

// Strips whose scales of columns are written together.
constexpr uint32 kNormScaleStrips = 8;

struct NormShared {
    // By columns and strips.
    alignas(16) uint32 column_scales[kMxTile][kNormScaleStrips];
    MxPlainShared plain;
    float mean[kMxTile];
    float rstd[kMxTile];
    uint64 arrived[kNormStrips];
};

// Dynamic shared memory, 128-byte aligned: tiles [kNormStrips], the stage of 16 KiB.
// `kPlain`: the matrix consists of whole tiles, see `mx_is_plain`.
template <bool kLayer, bool kAdd, bool kRow, bool kColumn, bool kPlain>
struct NormQuantize {
    const TensorMap& source;
    const NormOperands& operands;
    const MxTarget& to;
    const NormGroup& group;
    NormShared& shared;
    uint4* tiles;
    MxTeam team;
    uint32 slices;  // of a row
    uint32 index;   // of the group
    uint32 column0;
    uint32 first_row0;  // of this group's strips
    uint32 end_row0;    // beyond them

    static constexpr uint32 kTilePieces = NormTile::kTileBytes / 16;

    __device__ __forceinline__ NormQuantize(const TensorMap& source, const NormOperands& operands,
                                            const MxTarget& to, const NormGroup& group,
                                            NormShared& shared, uint4* tiles)
        : source(source), operands(operands), to(to), group(group), shared(shared), tiles(tiles),
          team(MxTeam::mine()) {
        slices = (to.columns + kSlice - 1) / kSlice;
        index = blockIdx.x / slices;
        column0 = blockIdx.x % slices * kSlice;
        const uint32 groups = gridDim.x / slices;
        const uint32 strips = (to.rows + kMxTile - 1) / kMxTile;
        const uint32 of_group = (strips + groups - 1) / groups;
        first_row0 = min(index * of_group, strips) * kMxTile;
        end_row0 = min((index + 1) * of_group, strips) * kMxTile;
    }

    // The tile of this group's strip number `turn`.
    __device__ __forceinline__ uint4* tile(uint32 turn) const {
        return tiles + turn % kNormStrips * kTilePieces;
    }
    // This thread's first piece there; its others are a row further each.
    __device__ __forceinline__ uint4* own(uint32 turn) const {
        return tile(turn) + mx_plain_row(team) * kMxRowLanes + team.thread % kMxRowLanes;
    }
    __device__ __forceinline__ uint32 column() const {
        return column0 + mx_plain_column(team);
    }
    // This thread's row `i` in a strip.
    __device__ __forceinline__ uint32 row(int i) const {
        return mx_plain_row(team) + i;
    }
    __device__ __forceinline__ bool exists(uint32 row0, int i) const {
        return kPlain || (row0 + row(i) < to.rows && column() < to.columns);
    }
    __device__ __forceinline__ bool column_exists() const {
        return kPlain || column() < to.columns;
    }
    // Where this thread's piece lies in a matrix.
    __device__ __forceinline__ uint64 place(uint32 row0, int i) const {
        return static_cast<uint64>(row0 + row(i)) * to.columns + column();
    }

    // By one thread: has the strip copied.
    __device__ __forceinline__ void start_copy(uint32 turn, uint32 row0) const {
        uint64* const arrived = &shared.arrived[turn % kNormStrips];
        mbarrier_expect(arrived, NormTile::kTileBytes);
        tensor_copy_2d(tile(turn), source, column0, row0, arrived);
    }

    // First element of a row of what is normalized; zero beyond the matrix.
    __device__ __forceinline__ float first_of(uint32 row) const {
        if (!kPlain && row >= to.rows) {
            return 0.0f;
        }
        const uint64 at = static_cast<uint64>(row) * to.columns;
        const float value = to_f32(operands.x[at]);
        return kAdd ? to_f32(to_bf16(value + to_f32(operands.delta[at]))) : value;
    }

    __device__ __forceinline__ uint32* counter(uint32 kind, uint32 turn) const {
        return group.counters + (index * kNormKinds + kind) * kNormCounters +
               turn % kNormCounters;
    }
    // [slices, 128]
    __device__ __forceinline__ float* sums(uint32 kind, uint32 turn) const {
        const uint32 which = (index * kNormKinds + kind) * kNormSums + turn % kNormSums;
        return group.sums + static_cast<uint64>(which) * slices * kMxTile;
    }

    // Of two numbers of this thread it keeps one and gives the other to the thread `lanes` further:
    // the sum of what both had of the one that it keeps.
    static __device__ __forceinline__ float keep_sum(float first, float second, uint32 lanes) {
        const bool keeps_second = threadIdx.x & lanes;
        const float kept = keeps_second ? second : first;
        const float given = keeps_second ? first : second;
        return __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, given, lanes));
    }

    // Gives this thread's part of the sums over the rows of a slice to the group.
    __device__ __forceinline__ void give_sums(uint32 kind, uint32 turn,
                                              const float (&values)[kMxPlainRows]) const {
        // The sums of `sum_of_16_lanes`, in its order; in the end each of eight threads has a row.
        float of_four[4], of_two[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            of_four[i] = keep_sum(values[i], values[i + 4], 1);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            of_two[i] = keep_sum(of_four[i], of_four[i + 2], 2);
        }
        float of_row = keep_sum(of_two[0], of_two[1], 4);
        of_row = __fadd_rn(of_row, __shfl_xor_sync(0xffffffffu, of_row, 8));
        const uint32 lane = team.thread % kMxRowLanes;
        if (lane < kMxPlainRows) {
            const uint32 row = mx_plain_row(team) + lane % 2 * 4 + lane / 2 % 2 * 2 + lane / 4;
            __stcg(sums(kind, turn) + column0 + row, of_row);
        }
        team.sync();
        if (team.thread == 0) {
            add_release(counter(kind, turn), 1);
        }
    }

    // Step 1.
    __device__ __forceinline__ void sum_strip(uint32 turn, uint32 row0) const {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        uint4 deltas[kMxPlainRows];
        if (kAdd) {
#pragma unroll
            for (int i = 0; i < kMxPlainRows; ++i) {
                deltas[i] = exists(row0, i) ? *reinterpret_cast<const uint4*>(operands.delta +
                                                                              place(row0, i))
                                            : zero;
            }
        }
        float firsts[kMxPlainRows];
        if (kLayer) {
#pragma unroll
            for (int i = 0; i < kMxPlainRows; ++i) {
                firsts[i] = first_of(row0 + row(i));
            }
        }
        mbarrier_wait(&shared.arrived[turn % kNormStrips], turn / kNormStrips % 2);
        float values[kMxPlainRows];
        uint4* const pieces = own(turn);
#pragma unroll
        for (int i = 0; i < kMxPlainRows; ++i) {
            uint4 piece = pieces[i * kMxRowLanes];
            if (kAdd) {
                piece = add_bf16x8(piece, deltas[i]);
                pieces[i * kMxRowLanes] = piece;
                if (exists(row0, i)) {
                    *reinterpret_cast<uint4*>(operands.sum + place(row0, i)) = piece;
                }
            }
            if (kLayer) {
                const float distances = sum_of_distances(piece, firsts[i]);
                values[i] = column_exists() ? distances : 0.0f;
            } else {
                float of_piece[8];
                unpack_bf16x8(piece, of_piece);
                values[i] = sum_of_squares(of_piece);
            }
        }
        give_sums(0, turn, values);
    }

    // Step 2: `finish(total, row)` of the total of each row, into `result`, and into `stored`
    // [rows].
    template <typename Finish>
    __device__ __forceinline__ void finish_rows(uint32 kind, uint32 turn, uint32 row0,
                                                float* result, float* stored,
                                                const Finish& finish) const {
        if (team.thread == 0) {
            const uint32 all = (turn / kNormCounters + 1) * slices;
            while (load_acquire(counter(kind, turn)) < all) {
            }
        }
        team.sync();
        // Two threads a row, each with sixteen of the 32 sums of `sum_of_slices`.
        const float* const given = sums(kind, turn);
        const uint32 row = team.thread / 32 * 16 + team.thread % 16;
        const uint32 first = team.thread % 32 / 16 * 16;
        float of_lane[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            of_lane[i] = 0.0f;
        }
        for (uint32 base = first; base < slices; base += 32) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (base + i < slices) {
                    of_lane[i] =
                        __fadd_rn(of_lane[i], __ldcg(given + (base + i) * kMxTile + row));
                }
            }
        }
        float of_two[8], of_four[4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            of_two[i] = __fadd_rn(of_lane[2 * i], of_lane[2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            of_four[i] = __fadd_rn(of_two[2 * i], of_two[2 * i + 1]);
        }
        float total =
            __fadd_rn(__fadd_rn(of_four[0], of_four[1]), __fadd_rn(of_four[2], of_four[3]));
        total = __fadd_rn(total, __shfl_xor_sync(0xffffffffu, total, 16));
        const float finished = finish(total, row0 + row);
        if (first == 0) {
            result[row] = finished;
            if (column0 == 0 && (kPlain || row0 + row < to.rows)) {
                stored[row0 + row] = finished;
            }
        }
        team.sync();
    }

    // Mean and rstd of the rows of a strip.
    __device__ __forceinline__ void finish_strip(uint32 turn, uint32 row0) const {
        const uint32 columns = to.columns;
        const float eps = operands.eps;
        if (kLayer) {
            finish_rows(0, turn, row0, shared.mean, operands.mean, [&](float total, uint32 row) {
                return mean_from(first_of(row), total, columns);
            });
            float values[kMxPlainRows];
#pragma unroll
            for (int i = 0; i < kMxPlainRows; ++i) {
                const float squares =
                    sum_of_squared_distances(own(turn)[i * kMxRowLanes], shared.mean[row(i)]);
                values[i] = column_exists() ? squares : 0.0f;
            }
            give_sums(1, turn, values);
        }
        finish_rows(kLayer ? 1 : 0, turn, row0, shared.rstd, operands.rstd,
                    [=](float total, uint32) { return rms_rstd(total, columns, eps); });
    }

    // Normalizes this thread's pieces; those beyond the matrix are zeros, whatever the mean.
    __device__ __forceinline__ void normalize(uint32 row0, uint4 (&pieces)[kMxPlainRows]) const {
        const bool real = column_exists();
        const uint4 zero = make_uint4(0, 0, 0, 0);
        const uint4 weight =
            real ? *reinterpret_cast<const uint4*>(operands.weight + column()) : zero;
        const uint4 bias =
            kLayer && real ? *reinterpret_cast<const uint4*>(operands.bias + column()) : zero;
#pragma unroll
        for (int i = 0; i < kMxPlainRows; ++i) {
            const float rstd = shared.rstd[row(i)];
            const uint4 y = kLayer ? layer_normalized(pieces[i], shared.mean[row(i)], rstd, weight,
                                                      bias)
                                   : rms_normalized(pieces[i], rstd, weight);
            const bool here = exists(row0, i);
            pieces[i] = here ? y : zero;
            if (operands.y != nullptr && here) {
                *reinterpret_cast<uint4*>(operands.y + place(row0, i)) = y;
            }
        }
    }

    // Writes the scales of columns of the strips from `first` to `last`, of one multiple of
    // `kNormScaleStrips` to the next.
    __device__ __forceinline__ void write_column_scales(uint32 first, uint32 last) const {
        const uint32 in_tile = team.thread / 2;
        const uint32 begin = last / kNormScaleStrips * kNormScaleStrips + team.thread % 2 * 4;
        const uint32 strips = to.rows / kMxTile;
        const uint32* const from = &shared.column_scales[in_tile][begin % kNormScaleStrips];
        uint32* const target = reinterpret_cast<uint32*>(to.scales_t) +
                               static_cast<uint64>(column0 + in_tile) * strips + begin;
        if (strips % 4 == 0 && first <= begin && begin + 3 <= last) {
            *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(from);
            return;
        }
#pragma unroll
        for (uint32 i = 0; i < 4; ++i) {
            if (first <= begin + i && begin + i <= last) {
                target[i] = from[i];
            }
        }
    }

    // Step 3.
    __device__ __forceinline__ void quantize_strip(uint32 turn, uint32 row0, uint32 flags,
                                                   MxCounters& counters) const {
        uint4 pieces[kMxPlainRows];
        uint4* const places = own(turn);
#pragma unroll
        for (int i = 0; i < kMxPlainRows; ++i) {
            pieces[i] = places[i * kMxRowLanes];
        }
        const auto next_copy = [&] {
            fence_before_copies();
            team.sync();
            if (team.thread == 0 && row0 + kNormStrips * kMxTile < end_row0) {
                start_copy(turn + kNormStrips, row0 + kNormStrips * kMxTile);
            }
        };
        if constexpr (kPlain) {
            next_copy();
            normalize(row0, pieces);
            uint4* const stage = tiles + kNormStrips * kTilePieces;
            const uint32 strip = row0 / kMxTile;
            const auto put_scales = [&](uint32 column, uint32 scales) {
                shared.column_scales[column][strip % kNormScaleStrips] = scales;
            };
            if (flags & kMxWide) {
                mx_quantize_pieces<true, kRow, kColumn>(pieces, row0, column0, to, stage,
                                                        shared.plain, team, put_scales, counters);
            } else {
                mx_quantize_pieces<false, kRow, kColumn>(pieces, row0, column0, to, stage,
                                                         shared.plain, team, put_scales, counters);
            }
            const bool is_last = row0 + kMxTile >= end_row0;
            if (kColumn && (is_last || strip % kNormScaleStrips == kNormScaleStrips - 1)) {
                write_column_scales(first_row0 / kMxTile, strip);
            }
        } else {
            __shared__ MxShared of_tile;
            normalize(row0, pieces);
#pragma unroll
            for (int i = 0; i < kMxPlainRows; ++i) {
                places[i * kMxRowLanes] = pieces[i];
            }
            // The threads take others than they put.
            mx_begin_tile();
            mx_quantize_tile<bf16, kRow, kColumn>(row0, column0, to, flags,
                                                  reinterpret_cast<uint32*>(tile(turn)), of_tile,
                                                  counters);
            next_copy();
        }
    }

    __device__ __forceinline__ void run(uint32 flags, MxCounters& counters) const {
        if (team.thread == 0) {
#pragma unroll
            for (uint32 turn = 0; turn < kNormStrips; ++turn) {
                mbarrier_init(&shared.arrived[turn]);
            }
#pragma unroll
            for (uint32 turn = 0; turn < kNormStrips; ++turn) {
                if (first_row0 + turn * kMxTile < end_row0) {
                    start_copy(turn, first_row0 + turn * kMxTile);
                }
            }
        }
        __syncthreads();
        if (first_row0 < end_row0) {
            sum_strip(0, first_row0);
        }
        uint32 turn = 0;
        for (uint32 row0 = first_row0; row0 < end_row0; row0 += kMxTile, ++turn) {
            if (row0 + kMxTile < end_row0) {
                sum_strip(turn + 1, row0 + kMxTile);
            }
            finish_strip(turn, row0);
            quantize_strip(turn, row0, flags, counters);
        }
    }
};

// The whole kernel; `partials` [gridDim.x, 5], `statistics` [6]. Blocks of 256 threads, as many as
// slices for each group.
template <bool kLayer, bool kAdd, bool kRow, bool kColumn>
__device__ __forceinline__ void norm_quantize(const TensorMap& source,
                                              const NormOperands& operands, const MxTarget& to,
                                              const NormGroup& group, uint32 flags,
                                              uint64* partials, uint32* ticket,
                                              uint64* statistics) {
    extern __shared__ __align__(128) uint4 dynamic[];
    __shared__ NormShared shared;
    MxCounters counters;
    if (mx_is_plain(to, flags)) {
        const NormQuantize<kLayer, kAdd, kRow, kColumn, true> block(source, operands, to, group,
                                                                    shared, dynamic);
        block.run(flags, counters);
    } else {
        const NormQuantize<kLayer, kAdd, kRow, kColumn, false> block(source, operands, to, group,
                                                                     shared, dynamic);
        block.run(flags, counters);
    }
    const uint64 copies = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    const bool last = mx_write_statistics(counters, blockIdx.x, gridDim.x, partials, ticket,
                                          copies * to.rows * to.columns, statistics);
    if (last) {
        const uint32 slices = (to.columns + kSlice - 1) / kSlice;
        const uint32 counters_used = gridDim.x / slices * kNormKinds * kNormCounters;
        for (uint32 i = threadIdx.x; i < counters_used; i += blockDim.x) {
            group.counters[i] = 0;
        }
    }
}
