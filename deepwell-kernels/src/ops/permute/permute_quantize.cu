// Rows of tokens to rows of pairs, and their block quantization to MXFP8: data and scales along
// rows, down columns, or both, and their counters. The rows have the bits of `permute.cu`; how the
// work is split in `layout/row_quantize.cuh`.
//
// Every row of x is read as often as its token has pairs, by CTAs that are far from each other. So
// CTAs go down a band of columns, of which the tokens' elements stay in the L2 cache, before the
// next: 4 x 128 columns of 16,384 tokens are 16 MiB.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/row_quantize.cuh"

// Tiles across a band.
constexpr uint32 kBand = 4;

// As `Rows` of `layout/row_quantize.cuh`.
struct PermutedRows {
    using Loaded = uint4;
    const bf16* __restrict__ x;
    const int32* tokens;  // of the rows of the tile; negative without a pair
    uint32 columns;

    __device__ __forceinline__ uint4 load(uint32 in_tile, const ElementPlace& place) const {
        const int32 token = tokens[in_tile];
        return token < 0 ? make_uint4(0, 0, 0, 0)
                         : load_vector(x, {static_cast<uint32>(token), place.column}, columns);
    }
    __device__ __forceinline__ uint4 result(const uint4& loaded, uint32) const {
        return loaded;
    }
};

// x [tokens, columns], pairs [rows], out [rows, columns]; 16-byte aligned, columns a multiple of 8;
// out may be null. Outputs as in `MxTarget`; statistics [6]. A CTA for each tile, one at least.
#define KERNEL(name, row, column)                                                                \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ x, const int32* __restrict__ pairs,                        \
             bf16* __restrict__ out, uint8* __restrict__ data, uint8* __restrict__ scales,       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics,                 \
             uint32 top_k) {                                                                     \
        __shared__ int32 tokens[kMxTile];                                                        \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        const ElementPlaces places(blockIdx.x, to, kBand);                                       \
        if (threadIdx.x < kMxTile) {                                                             \
            const uint32 at = places.row0 + threadIdx.x;                                         \
            const int32 pair = at < rows ? pairs[at] : -1;                                       \
            tokens[threadIdx.x] =                                                                \
                pair < 0 ? -1 : static_cast<int32>(static_cast<uint32>(pair) / top_k);           \
        }                                                                                        \
        __syncthreads();                                                                         \
        row_quantize<row, column>(PermutedRows{x, tokens, columns}, places, out, to, flags,      \
                                  totals, statistics);                                           \
    }

KERNEL(permute_quantize_row, true, false)
KERNEL(permute_quantize_column, false, true)
KERNEL(permute_quantize_both, true, true)
