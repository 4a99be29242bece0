// Token embedding: out[t, :] = table[tokens[t], :], a copy of rows.
//
// tokens [rows] i32, table [vocab, width], out [rows, width], where width counts units of 16 bytes,
// or single BF16 if rows are not whole units. A CTA writes 1024 consecutive units of the output at
// a time, four per thread, so that narrow and wide rows use all threads. A token outside the table
// gives a row of NaN, which the loss then shows.
//
// A rank with a slice of the vocabulary, the rows from `first` on, gives zeros for other ranks'
// tokens. `slice_tokens` writes the row of each token within the slice, or -1.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr int kTile = kThreads * kUnitsPerThread;

__device__ __forceinline__ void set_nan(uint4& unit) {
    unit = make_uint4(0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu);
}

__device__ __forceinline__ void set_nan(uint16& unit) {
    unit = 0x7fff;
}

__device__ __forceinline__ void set_zero(uint4& unit) {
    unit = make_uint4(0u, 0u, 0u, 0u);
}

__device__ __forceinline__ void set_zero(uint16& unit) {
    unit = 0;
}

// The rows of the vocabulary on this rank, and the number of rows on all ranks.
struct Slice {
    uint32 first;
    uint32 rows;
    uint32 vocab;
};

template <typename Unit>
__device__ __forceinline__ void embed(const int32* __restrict__ tokens,
                                      const Unit* __restrict__ table, Unit* __restrict__ out,
                                      uint64 rows, Slice slice, uint32 width) {
    const uint64 units = rows * width;
    const uint64 stride = static_cast<uint64>(gridDim.x) * kTile;
    for (uint64 tile = static_cast<uint64>(blockIdx.x) * kTile; tile < units; tile += stride) {
        const uint64 first_row = tile / width;
        const uint32 first_column = static_cast<uint32>(tile - first_row * width);
        uint32 row[kUnitsPerThread];  // of the table
        uint32 column[kUnitsPerThread];
#pragma unroll
        for (int k = 0; k < kUnitsPerThread; ++k) {
            const uint32 ahead = threadIdx.x + k * kThreads;
            const uint32 place = first_column + ahead;
            column[k] = place % width;
            row[k] = tile + ahead < units
                         ? static_cast<uint32>(tokens[first_row + place / width])
                         : slice.vocab;
        }
        Unit unit[kUnitsPerThread];
#pragma unroll
        for (int k = 0; k < kUnitsPerThread; ++k) {
            // As unsigned numbers, negative tokens and rows before the slice are large.
            const uint32 own = row[k] - slice.first;
            if (row[k] >= slice.vocab) {
                set_nan(unit[k]);
            } else if (own < slice.rows) {
                unit[k] = table[static_cast<uint64>(own) * width + column[k]];
            } else {
                set_zero(unit[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < kUnitsPerThread; ++k) {
            const uint64 at = tile + threadIdx.x + k * kThreads;
            if (at < units) {
                out[at] = unit[k];
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    embedding_16_bytes(const int32* __restrict__ tokens, const uint4* __restrict__ table,
                       uint4* __restrict__ out, uint64 rows, uint32 first, uint32 own,
                       uint32 vocab, uint32 width) {
    embed(tokens, table, out, rows, Slice{first, own, vocab}, width);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    embedding_2_bytes(const int32* __restrict__ tokens, const uint16* __restrict__ table,
                      uint16* __restrict__ out, uint64 rows, uint32 first, uint32 own,
                      uint32 vocab, uint32 width) {
    embed(tokens, table, out, rows, Slice{first, own, vocab}, width);
}

// rows_of_slice [count].
extern "C" __global__ void __launch_bounds__(kThreads)
    slice_tokens(const int32* __restrict__ tokens, int32* __restrict__ rows_of_slice, uint32 count,
                 uint32 first, uint32 own) {
    const uint32 at = blockIdx.x * kThreads + threadIdx.x;
    if (at < count) {
        const uint32 row = static_cast<uint32>(tokens[at]) - first;
        rows_of_slice[at] = row < own ? static_cast<int32>(row) : -1;
    }
}
