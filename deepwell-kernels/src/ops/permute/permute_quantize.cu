// Rows of tokens to rows of pairs, with block quantization to MXFP8: data and scales along rows,
// down columns, or both, and their counters. The rows have the bits of `permute.cu`;
// `layout/row_quantize.cuh` documents how the work is divided.
//
// An element is read as two bytes and written as one per operand. A row of x is read once per pair
// of its token, by CTAs far from each other. CTAs therefore process a whole band of columns before
// the next band, so that the band's elements of all tokens stay in the L2 cache: 4 x 128 columns of
// 16,384 tokens are 16 MiB. For 16,384 tokens of 2048 elements with six pairs each, in 106,496
// rows, 67 MB are read and 450 MB written, 125 us on an H200 that copies 4.1 TB/s; the L2 cache
// supplies another 369 MB.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/row_quantize.cuh"
#include "ptx/cp_async.cuh"

// Tiles across a band of columns.
constexpr uint32 kBand = 4;

// The tokens of this tile's rows and of the next tile's, negative for rows without a pair.
using TokensOfTiles = int32[2][kMxTile];

// Implements `Rows` of `layout/row_quantize.cuh`.
struct PermutedRows {
    using Loaded = uint4;
    static constexpr bool kWalks = true;
    // The loaded values are the tile's values, so loading all of them at once needs no more
    // registers.
    static constexpr int kTogether = kMxPlainRows;
    const bf16* __restrict__ x;
    const int32* __restrict__ pairs;
    TokensOfTiles& tokens;
    uint32 columns;
    uint32 top_k;
    uint32 now = 0;
    bool asked = false;  // whether this thread prefetches a row of the next tile

    __device__ __forceinline__ int32 token_of(int32 pair) const {
        return pair < 0 ? -1 : static_cast<int32>(static_cast<uint32>(pair) / top_k);
    }
    __device__ __forceinline__ void begin(const ElementPlaces& first, const ElementPlaces&) {
        if (threadIdx.x < kMxTile) {
            const uint32 row = first.row0 + threadIdx.x;
            tokens[0][threadIdx.x] = row < first.rows ? token_of(pairs[row]) : -1;
        }
        __syncthreads();
    }
    __device__ __forceinline__ void ask(const ElementPlaces& next, const ElementPlaces&) {
        asked = threadIdx.x < kMxTile && next.any();
        if (asked) {
            cp_async_4(static_cast<uint32>(__cvta_generic_to_shared(own())),
                       pairs + next.row0 + threadIdx.x, 4);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void take() {
        cp_async_wait<0>();
        if (asked) {
            *own() = token_of(*own());
        }
    }
    __device__ __forceinline__ void advance() {
        now ^= 1;
    }

    __device__ __forceinline__ uint4 load(uint32 in_tile, const ElementPlace& place) const {
        const int32 token = tokens[now][in_tile];
        return token < 0 ? make_uint4(0, 0, 0, 0)
                         : load_vector(x, {static_cast<uint32>(token), place.column}, columns);
    }
    __device__ __forceinline__ uint4 result(const uint4& loaded, uint32) const {
        return loaded;
    }

  private:
    // This thread's row of the next tile, private to the thread until a barrier.
    __device__ __forceinline__ int32* own() const {
        return &tokens[now ^ 1][threadIdx.x];
    }
};

// x [tokens, columns], pairs [rows], out [rows, columns]; 16-byte aligned, columns a multiple of 8;
// out may be null. Outputs as in `MxTarget`; statistics [6]. Grid as in `row_quantize`.
#define KERNEL(name, row, column)                                                                \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ x, const int32* __restrict__ pairs,                        \
             bf16* __restrict__ out, uint8* __restrict__ data, uint8* __restrict__ scales,       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics,                 \
             uint32 top_k) {                                                                     \
        __shared__ TokensOfTiles tokens;                                                         \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        row_quantize<row, column>(PermutedRows{x, pairs, tokens, columns, top_k}, kBand, out,    \
                                  to, flags, totals, statistics);                                \
    }

KERNEL(permute_quantize_row, true, false)
KERNEL(permute_quantize_column, false, true)
KERNEL(permute_quantize_both, true, true)
