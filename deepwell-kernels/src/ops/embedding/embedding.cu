// Token embedding: out[t, :] = table[tokens[t], :], a copy of rows.
//
// tokens [rows] i32, table [vocab, width], out [rows, width], where width counts units of 16
// bytes, or of one BF16 where a row is no multiple of that. A CTA takes 1024 units of the
// output at a time, in the order in which they lie, four a thread, so that narrow and wide rows
// fill it alike. A token that is not in the table gives a row of NaN: no loss hides that.
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

template <typename Unit>
__device__ __forceinline__ void embed(const int32* __restrict__ tokens,
                                      const Unit* __restrict__ table, Unit* __restrict__ out,
                                      uint64 rows, uint32 vocab, uint32 width) {
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
                         : vocab;
        }
        Unit unit[kUnitsPerThread];
#pragma unroll
        for (int k = 0; k < kUnitsPerThread; ++k) {
            set_nan(unit[k]);
            if (row[k] < vocab) {  // a negative token is a large number here
                unit[k] = table[static_cast<uint64>(row[k]) * width + column[k]];
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
                       uint4* __restrict__ out, uint64 rows, uint32 vocab, uint32 width) {
    embed(tokens, table, out, rows, vocab, width);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    embedding_2_bytes(const int32* __restrict__ tokens, const uint16* __restrict__ table,
                      uint16* __restrict__ out, uint64 rows, uint32 vocab, uint32 width) {
    embed(tokens, table, out, rows, vocab, width);
}
