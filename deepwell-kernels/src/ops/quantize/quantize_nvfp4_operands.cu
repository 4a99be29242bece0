// Block quantization of a BF16 matrix to NVFP4 along rows and down columns (stored transposed), in
// two formats, from one read of the source. Each operand is rounded to nearest or stochastically;
// the random words are those of Philox at the element's index in the operand, with a seed and a
// step in device memory. The largest magnitude of the tensor is known for each operand. All results
// equal those of a quantization and a stochastic rounding for each operand, and the counters are
// those of rounding to nearest.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_tile.cuh"

struct Planes {
    uint8* data;
    uint8* scales;
    float* tensor_scale;
    uint64* statistics;
};

// How to quantize an operand: its amax [1], flags of `layout/nvfp4_block.cuh`, and stream of random
// words.
struct Operand {
    const float* amax;
    uint32 flags;
    uint64 stream;
    Planes to;
};

// Quantizes the tile at (`outer0`, `first0`) of an operand [outer, k].
template <bool kColumn, Fp4Rounding kRounding>
__device__ __forceinline__ MxCounters quantize(const bf16* tile, const Operand& operand,
                                               const uint64* __restrict__ key, uint32 outer,
                                               uint32 k, uint32 outer0, uint32 first0,
                                               Fp4Shared& shared) {
    const Fp4Constants constants = fp4_constants(__ldg(operand.amax), operand.flags);
    Fp4Words words = {};
    if constexpr (kRounding != Fp4Rounding::kNearest) {
        words = Fp4Words{__ldg(key), operand.stream | (__ldg(key + 1) & 0xffffffffu), 0, k};
    }
    MxCounters counters;
    const Fp4Operand to = {operand.to.data, operand.to.scales, outer, k};
    fp4_quantize_tile<bf16, kColumn, kRounding>(tile, to, outer0, first0, constants, words, shared,
                                                counters);
    __syncthreads();
    fp4_store_tile<true>(to, outer0, first0, shared);
    return counters;
}

// x [rows, columns], 16-byte aligned; key [2]: seed and step, null if both operands are rounded to
// nearest; totals [2]; statistics [6]. Rows and columns are multiples of four, but for operands
// rounded to nearest. One CTA per tile, at least one.
template <Fp4Rounding kRow, Fp4Rounding kColumn>
__device__ __forceinline__ void quantize_both(const bf16* __restrict__ x, const Operand& by_row,
                                              const Operand& by_column,
                                              const uint64* __restrict__ key, uint32 rows,
                                              uint32 columns, MxTotals* totals) {
    extern __shared__ uint4 dynamic[];
    __shared__ Fp4Shared shared;
    __shared__ MxTallyShared of_rows, of_columns;
    bf16* const tile = reinterpret_cast<bf16*>(dynamic);
    const uint32 across = (columns + kFp4Tile - 1) / kFp4Tile;
    const uint32 tiles = (rows + kFp4Tile - 1) / kFp4Tile * across;
    MxTally row_tally(of_rows, totals), column_tally(of_columns, totals + 1);
    MxCounters row_counters, column_counters;
    if (blockIdx.x < tiles) {
        const uint32 row0 = blockIdx.x / across * kFp4Tile;
        const uint32 column0 = blockIdx.x % across * kFp4Tile;
        fp4_load_tile(x, rows, columns, row0, column0, tile);
        __syncthreads();
        row_counters =
            quantize<false, kRow>(tile, by_row, key, rows, columns, row0, column0, shared);
        row_tally.leave(row_counters);
        __syncthreads();
        column_counters =
            quantize<true, kColumn>(tile, by_column, key, columns, rows, column0, row0, shared);
    } else {
        row_tally.leave(row_counters);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        *by_row.to.tensor_scale = fp4_constants(*by_row.amax, by_row.flags).decode_scale;
        *by_column.to.tensor_scale = fp4_constants(*by_column.amax, by_column.flags).decode_scale;
    }
    column_tally.leave(column_counters);
    __syncthreads();
    row_tally.give();
    column_tally.give();
    const uint64 elements = static_cast<uint64>(rows) * columns;
    row_tally.finish(gridDim.x, elements, by_row.to.statistics);
    column_tally.finish(gridDim.x, elements, by_column.to.statistics);
}

// CTAs that share an SM.
constexpr int kCtas = 3;

constexpr Fp4Rounding kNearest = Fp4Rounding::kNearest;
constexpr Fp4Rounding kStochastic = Fp4Rounding::kStochasticAligned;

#define QUANTIZE_KERNEL(name, row, column)                                                       \
    extern "C" __global__ void __launch_bounds__(kFp4Threads, kCtas)                             \
        name(const bf16* __restrict__ x, const float* __restrict__ row_amax,                     \
             const float* __restrict__ column_amax, const uint64* __restrict__ key,              \
             uint8* __restrict__ data, uint8* __restrict__ scales,                               \
             float* __restrict__ tensor_scale, uint64* statistics, uint8* __restrict__ data_t,   \
             uint8* __restrict__ scales_t, float* __restrict__ tensor_scale_t,                   \
             uint64* statistics_t, uint32 rows, uint32 columns, uint32 row_flags,                \
             uint32 column_flags, uint64 row_stream, uint64 column_stream, MxTotals* totals) {   \
        const Planes to = {data, scales, tensor_scale, statistics};                              \
        const Planes to_t = {data_t, scales_t, tensor_scale_t, statistics_t};                    \
        quantize_both<row, column>(x, Operand{row_amax, row_flags, row_stream, to},              \
                                   Operand{column_amax, column_flags, column_stream, to_t}, key, \
                                   rows, columns, totals);                                       \
    }

QUANTIZE_KERNEL(quantize_nvfp4_operands_nearest, kNearest, kNearest)
QUANTIZE_KERNEL(quantize_nvfp4_operands_row_stochastic, kStochastic, kNearest)
QUANTIZE_KERNEL(quantize_nvfp4_operands_column_stochastic, kNearest, kStochastic)
QUANTIZE_KERNEL(quantize_nvfp4_operands_stochastic, kStochastic, kStochastic)
