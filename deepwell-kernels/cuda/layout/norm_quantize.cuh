// Row normalization fused with block quantization of its output; the source is read from HBM once.
//
// Column blocks need 32 or 128 rows of y together, and y needs the statistics of whole rows: 128
// rows (an M-block) at a time, which do not fit in an SM. So CTAs do two kinds of work:
//
//   rows: the statistics of eight rows of an M-block, one warp per row, and their sums with delta;
//         a counter of the M-block is then incremented.
//   a tile: 128 columns of an M-block. Once all its rows are counted, they are read again,
//         normalized and quantized as in `layout/mx_plain_tile.cuh`.
//
// Row statistics run `lookahead` M-blocks ahead of the tiles, about the number that run at once:
// tiles then seldom wait, and their rows are still in the L2 cache. CTAs start in the order of
// their indices and wait only for CTAs with lower indices.
#pragma once

#include "common/types.cuh"
#include "layout/mx_plain_tile.cuh"
#include "layout/mx_statistics.cuh"
#include "layout/mx_tile.cuh"
#include "layout/norm_rows.cuh"
#include "layout/norm_value.cuh"
#include "layout/row_quantize.cuh"
#include "ptx/cache.cuh"
#include "ptx/release.cuh"

// Rows per CTA, one warp each.
constexpr uint32 kNormRows = kMxPlainThreads / 32;
// CTAs that compute the row statistics of an M-block.
constexpr uint32 kNormRowCtas = kMxTile / kNormRows;
// Rows of a tile that a thread loads together.
constexpr int kNormTogether = 4;

// Work of a CTA.
struct NormWork {
    bool is_tile;
    uint32 m_block;
    uint32 index;  // of the tile in the M-block, or of the eight rows

    // Work of CTA `cta` among the CTAs for `m_blocks` of `tiles` tiles each. The rows of
    // `lookahead` M-blocks precede the first tile; then the rows of one M-block and the tiles of
    // another alternate.
    __device__ __forceinline__ NormWork(uint32 cta, uint32 m_blocks, uint32 tiles,
                                        uint32 lookahead) {
        const uint32 ahead = lookahead * kNormRowCtas;
        if (cta < ahead) {
            *this = {false, cta / kNormRowCtas, cta % kNormRowCtas};
            return;
        }
        const uint32 both = kNormRowCtas + tiles, rest = cta - ahead;
        const uint32 turn = rest / both, in_turn = rest % both;
        if (turn < m_blocks - lookahead) {
            *this = in_turn < kNormRowCtas ? NormWork{false, turn + lookahead, in_turn}
                                             : NormWork{true, turn, in_turn - kNormRowCtas};
            return;
        }
        const uint32 last = rest - (m_blocks - lookahead) * both;
        *this = {true, m_blocks - lookahead + last / tiles, last % tiles};
    }

  private:
    __device__ __forceinline__ NormWork(bool is_tile, uint32 m_block, uint32 index)
        : is_tile(is_tile), m_block(m_block), index(index) {}
};

// Computes one vector of y; bias and mean are used in a layer normalization only.
template <bool kLayer>
__device__ __forceinline__ uint4 norm_vector(const uint4& vector, float mean, float rstd,
                                            const uint4& weight, const uint4& bias) {
    return kLayer ? layer_normalized(vector, mean, rstd, weight, bias)
                  : rms_normalized(vector, rstd, weight);
}

// All threads: waits for the row statistics of an M-block, given its counter. One thread polls for
// the CTA, because each acquire load invalidates the L1 cache.
__device__ __forceinline__ void norm_wait(const uint32* counter) {
    if (threadIdx.x == 0) {
        while (load_acquire(counter) < kNormRowCtas) {
        }
    }
    __syncthreads();
}

// A tile of `layout/mx_plain_tile.cuh`.
template <bool kLayer, bool kAdd, bool kWide, bool kRow, bool kColumn>
__device__ __forceinline__ void norm_plain_tile(const NormOperands& operands, const MxTarget& to,
                                                const NormWork& work, const uint32* counter,
                                                uint4* stage, MxTally& tally) {
    __shared__ MxPlainShared shared;
    const uint32 row0 = work.m_block * kMxTile, column0 = work.index * kMxTile;
    const uint32 row = row0 + mx_plain_row(), column = column0 + mx_plain_column();
    const uint64 first = static_cast<uint64>(row) * to.columns + column;
    const bf16* const source = (kAdd ? operands.sum : operands.x) + first;
    const uint4 weight = *reinterpret_cast<const uint4*>(operands.weight + column);
    uint4 bias = make_uint4(0, 0, 0, 0);
    if (kLayer) {
        bias = *reinterpret_cast<const uint4*>(operands.bias + column);
    }
    uint4 vectors[kMxPlainRows];
    const auto load = [&](int begin) {
#pragma unroll
        for (int i = begin; i < begin + kNormTogether; ++i) {
            vectors[i] =
                load_for_the_last_time(source + static_cast<uint64>(i) * to.columns);
        }
    };
    // The sum is written by the CTAs that compute the rows; x is an input.
    if (!kAdd) {
        load(0);
    }
    norm_wait(counter);
#pragma unroll
    for (int begin = 0; begin < kMxPlainRows; begin += kNormTogether) {
        if (kAdd || begin > 0) {
            load(begin);
        }
        const float4 rstd = __ldcg(reinterpret_cast<const float4*>(operands.rstd + row + begin));
        float4 mean = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (kLayer) {
            mean = __ldcg(reinterpret_cast<const float4*>(operands.mean + row + begin));
        }
        const float rstds[4] = {rstd.x, rstd.y, rstd.z, rstd.w};
        const float means[4] = {mean.x, mean.y, mean.z, mean.w};
#pragma unroll
        for (int i = 0; i < kNormTogether; ++i) {
            uint4& vector = vectors[begin + i];
            vector = norm_vector<kLayer>(vector, means[i], rstds[i], weight, bias);
            if (operands.y != nullptr) {
                const uint64 place = first + static_cast<uint64>(begin + i) * to.columns;
                *reinterpret_cast<uint4*>(operands.y + place) = vector;
            }
        }
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(vectors, row0, column0, to, stage, shared, tally);
}

// Any tile.
template <bool kLayer, bool kAdd, bool kRow, bool kColumn>
__device__ __forceinline__ void norm_tile(const NormOperands& operands, const MxTarget& to,
                                          const NormWork& work, const uint32* counter,
                                          uint32 flags, uint32* tile, MxTally& tally) {
    __shared__ MxShared shared;
    MxCounters counters;
    const uint32 across = (to.columns + kMxTile - 1) / kMxTile;
    const ElementPlaces places(work.m_block * across + work.index, to);
    const uint32 column = places.column0 + ElementTile::column();
    const uint4 zero = make_uint4(0, 0, 0, 0);
    const bool real = column < to.columns;
    const uint4 weight =
        real ? *reinterpret_cast<const uint4*>(operands.weight + column) : zero;
    const uint4 bias =
        kLayer && real ? *reinterpret_cast<const uint4*>(operands.bias + column) : zero;
    norm_wait(counter);
#pragma unroll 1
    for (int step = 0; step < kMxSteps; ++step) {
        // Elements beyond the matrix are zero, regardless of the mean.
        uint4 vector = zero;
        if (places.exists(step)) {
            const uint32 row = places.row0 + ElementTile::row() + step * kMxStepRows;
            const uint64 place = places.place(step).of(to.columns);
            const uint4 found = load_for_the_last_time((kAdd ? operands.sum : operands.x) + place);
            const float mean = kLayer ? __ldcg(operands.mean + row) : 0.0f;
            vector = norm_vector<kLayer>(found, mean, __ldcg(operands.rstd + row), weight, bias);
            if (operands.y != nullptr) {
                *reinterpret_cast<uint4*>(operands.y + place) = vector;
            }
        }
        mx_vector<bf16>(tile, step) = vector;
    }
    mx_quantize_tile<bf16, kRow, kColumn>(places.row0, places.column0, to, flags, tile, shared,
                                          counters);
    tally.leave(counters);
    __syncthreads();
    tally.give();
}

// The whole kernel. `lookahead` is at most the number of M-blocks; `counters` [M-blocks] are zero
// before and after. The grid has one CTA for each tile and for each eight rows of an M-block, or
// one CTA if there is no M-block. Dynamic shared memory is 16 KiB if all tiles are plain, otherwise
// the size of a tile.
template <bool kLayer, bool kAdd, bool kRow, bool kColumn>
__device__ __forceinline__ void norm_quantize(const NormOperands& operands, const MxTarget& to,
                                              uint32 flags, uint32 lookahead, uint32* counters,
                                              MxTotals* totals, uint64* statistics) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxTallyShared of_tally;
    const uint32 m_blocks = (to.rows + kMxTile - 1) / kMxTile;
    const uint32 across = (to.columns + kMxTile - 1) / kMxTile;
    const uint64 elements =
        static_cast<uint64>((kRow ? 1 : 0) + (kColumn ? 1 : 0)) * to.rows * to.columns;
    MxTally tally(of_tally, totals);
    if (m_blocks == 0) {
        tally.leave(MxCounters());
        __syncthreads();
        tally.give();
        tally.finish(1, elements, statistics);
        return;
    }
    const NormWork work(blockIdx.x, m_blocks, across, lookahead);
    uint32* const counter = counters + work.m_block;
    if (!work.is_tile) {
        const uint32 row =
            work.m_block * kMxTile + work.index * kNormRows + threadIdx.x / 32;
        if (row < to.rows) {
            norm_row<kLayer, kAdd>(operands, row, to.columns);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            add_release(counter, 1);
        }
        return;
    }
    if (!mx_is_plain(to, flags)) {
        norm_tile<kLayer, kAdd, kRow, kColumn>(operands, to, work, counter, flags,
                                               reinterpret_cast<uint32*>(dynamic), tally);
    } else if (flags & kMxWide) {
        norm_plain_tile<kLayer, kAdd, true, kRow, kColumn>(operands, to, work, counter, dynamic,
                                                           tally);
    } else {
        norm_plain_tile<kLayer, kAdd, false, kRow, kColumn>(operands, to, work, counter, dynamic,
                                                            tally);
    }
    tally.finish(m_blocks * across, elements, statistics);
    // The last tile of an M-block resets its counter; all CTAs of the M-block have passed a barrier
    // since they read it.
    if (threadIdx.x == 0 && atomicAdd(counter, 1u) == kNormRowCtas + across - 1) {
        atomicExch(counter, 0u);
    }
}
