// AdamW over weights that are quantized to MXFP8 in the same pass: squares of 128 x 128 elements
// share a scale by the RCEIL rule, data and scales along rows, down columns (stored transposed), or
// both.
//
// Each element is updated as in `adamw.cu` and then quantized as in `quantize_square.cu`, bit by
// bit, without reading the new weight again. A CTA has one square. A thread has 16 rows of four
// columns, in the layout of `layout/mx_square_tile.cuh`, and processes four rows at a time: all
// loads of the four rows are in flight before the first value is used. Each thread keeps its new
// weights in its own part of shared memory until the largest magnitude of the square is known.
//
// A step whose norm is not finite changes nothing.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/types.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_square_tile.cuh"
#include "layout/mx_statistics.cuh"

constexpr int kRowsAtOnce = 4;  // rows that a thread processes at a time
static_assert(kMxSquareRows % kRowsAtOnce == 0, "rows at once divide a tile");

// A parameter of the list: contiguous non-empty matrices of whole squares, each quantized
// separately. All addresses are 16-byte aligned; operands that are not requested are null.
struct SquareParameter {
    const float* gradient;
    float* master;
    float* first_moment;
    float* second_moment;
    uint8* data;
    uint8* scales;
    uint8* data_t;
    uint8* scales_t;
    MxTotals* totals;
    uint64* statistics;
    uint64 first_chunk;  // squares before this parameter
    uint32 rows;
    uint32 columns;
    uint32 squares;
    float weight_decay;
};

static_assert(sizeof(SquareParameter) == 104, "the host writes this layout");

template <bool kRow, bool kColumn>
__device__ __forceinline__ void quantize(const uint4 (&vectors)[kMxSquareRows], uint32 row0,
                                         uint32 column0, const MxTarget& to,
                                         const SquareParameter& p, uint4* stage,
                                         MxSquareShared& shared, MxTallyShared& of_tally) {
    constexpr uint64 kOperands = (kRow ? 1 : 0) + (kColumn ? 1 : 0);
    MxTally tally(of_tally, p.totals);
    mx_quantize_square<kRow, kColumn>(vectors, row0, column0, to, stage, shared, tally);
    tally.finish(p.squares, kOperands * p.squares * (kMxTile * kMxTile), p.statistics);
}

// table [parameters], one CTA per square; coefficients [1].
extern "C" __global__ void __launch_bounds__(kMxSquareThreads, 2)
    adamw_quantize(const SquareParameter* __restrict__ table, uint32 parameters,
                   const AdamwCoefficients* __restrict__ coefficients) {
    extern __shared__ uint4 weights[];  // [kMxSquareRows][kMxSquareThreads], then the stage
    __shared__ MxSquareShared shared;
    __shared__ MxTallyShared of_tally;
    const AdamwCoefficients c = *coefficients;
    if (c.applies == 0.0f) {
        return;
    }
    const SquareParameter& p = table[adamw_parameter_of(table, parameters, blockIdx.x)];
    const uint32 columns = p.columns;
    const uint32 across = columns / kMxTile, of_matrix = p.rows / kMxTile * across;
    const uint32 square = blockIdx.x - static_cast<uint32>(p.first_chunk);
    const uint32 matrix = square / of_matrix, in_matrix = square % of_matrix;
    const uint32 row0 = in_matrix / across * kMxTile, column0 = in_matrix % across * kMxTile;
    const float decay = adamw_decay(c, p.weight_decay);
    const uint64 first = static_cast<uint64>(p.rows) * columns * matrix +
                         static_cast<uint64>(row0 + mx_square_row()) * columns + column0 +
                         mx_square_column();
    const float* const gradients = p.gradient + first;
    float* const masters = p.master + first;
    float* const first_moments = p.first_moment + first;
    float* const second_moments = p.second_moment + first;
#pragma unroll 1
    for (int row = 0; row < kMxSquareRows; row += kRowsAtOnce) {
        float4 g[kRowsAtOnce], w[kRowsAtOnce], m[kRowsAtOnce], v[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const uint64 at = static_cast<uint64>(row + i) * columns;
            g[i] = *reinterpret_cast<const float4*>(gradients + at);
            w[i] = *reinterpret_cast<const float4*>(masters + at);
            m[i] = *reinterpret_cast<const float4*>(first_moments + at);
            v[i] = *reinterpret_cast<const float4*>(second_moments + at);
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const uint64 at = static_cast<uint64>(row + i) * columns;
            adamw_update(g[i], w[i], m[i], v[i], decay, c);
            *reinterpret_cast<float4*>(masters + at) = w[i];
            *reinterpret_cast<float4*>(first_moments + at) = m[i];
            *reinterpret_cast<float4*>(second_moments + at) = v[i];
            weights[(row + i) * kMxSquareThreads + threadIdx.x] =
                make_uint4(__float_as_uint(w[i].x), __float_as_uint(w[i].y),
                           __float_as_uint(w[i].z), __float_as_uint(w[i].w));
        }
    }
    uint4 vectors[kMxSquareRows];
#pragma unroll
    for (int row = 0; row < kMxSquareRows; ++row) {
        vectors[row] = weights[row * kMxSquareThreads + threadIdx.x];
    }
    const MxTarget whole = {p.data, p.scales, p.data_t, p.scales_t, p.rows, columns};
    const MxTarget to = whole.of_stack(matrix);
    if (p.data == nullptr) {
        quantize<false, true>(vectors, row0, column0, to, p, weights, shared, of_tally);
    } else if (p.data_t == nullptr) {
        quantize<true, false>(vectors, row0, column0, to, p, weights, shared, of_tally);
    } else {
        quantize<true, true>(vectors, row0, column0, to, p, weights, shared, of_tally);
    }
}
