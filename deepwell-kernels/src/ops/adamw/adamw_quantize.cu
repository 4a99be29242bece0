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
#include "common/adamw_fp8.cuh"
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
    void* first_moment;  // FP32, or blocks of eight bits
    void* second_moment;
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
    uint64 index;  // among the parameters of the program
};

static_assert(sizeof(SquareParameter) == 112, "the host writes this layout");

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

// Both moments of a weight, from the thread's first element on. `at` is the distance of a row.
template <bool kFp8>
struct Moments;

template <>
struct Moments<false> {
    using Stored = float4;
    float* first;
    float* second;

    __device__ __forceinline__ Moments(const SquareParameter& p, uint64 begin)
        : first(static_cast<float*>(p.first_moment) + begin),
          second(static_cast<float*>(p.second_moment) + begin) {
    }
    __device__ __forceinline__ void load(uint64 at, Stored& m, Stored& v) const {
        m = *reinterpret_cast<const float4*>(first + at);
        v = *reinterpret_cast<const float4*>(second + at);
    }
    static __device__ __forceinline__ float4 first_of(const Stored& m) {
        return m;
    }
    static __device__ __forceinline__ float4 second_of(const Stored& v) {
        return v;
    }
    __device__ __forceinline__ void store(uint64 at, const float4& m, const float4& v, uint64,
                                          uint32, float) const {
        *reinterpret_cast<float4*>(first + at) = m;
        *reinterpret_cast<float4*>(second + at) = v;
    }
};

template <>
struct Moments<true> {
    using Stored = MomentQuad;
    uint8* first;
    uint8* second;

    __device__ __forceinline__ Moments(const SquareParameter& p, uint64 begin)
        : first(static_cast<uint8*>(p.first_moment) + block_at(begin)),
          second(static_cast<uint8*>(p.second_moment) + block_at(begin)) {
    }
    // A warp has 128 columns of a row, one block; rows have whole blocks.
    static __device__ __forceinline__ uint64 block_at(uint64 at) {
        return at / kMomentBlock * kMomentBlockBytes;
    }
    __device__ __forceinline__ void load(uint64 at, Stored& m, Stored& v) const {
        m = moment_load(first + block_at(at), threadIdx.x % 32);
        v = moment_load(second + block_at(at), threadIdx.x % 32);
    }
    static __device__ __forceinline__ float4 first_of(const Stored& m) {
        return moment_decode(m);
    }
    static __device__ __forceinline__ float4 second_of(const Stored& v) {
        return moment_squares(moment_decode(v));
    }
    __device__ __forceinline__ void store(uint64 at, const float4& m, const float4& v,
                                          uint64 begin, uint32 parameter, float step) const {
        moments_store(first + block_at(at), second + block_at(at), threadIdx.x % 32, m, v,
                      (begin + at) / 4, parameter, step);
    }
};

static_assert(kMxSquareLanes == 32 && kMxTile == kMomentBlock, "a warp has a block of a row");

template <bool kFp8>
__device__ __forceinline__ void update_square(const SquareParameter* __restrict__ table,
                                              uint32 parameters,
                                              const AdamwCoefficients* __restrict__ coefficients) {
    extern __shared__ uint4 weights[];  // [kMxSquareRows][kMxSquareThreads], then the stage
    __shared__ MxSquareShared shared;
    __shared__ MxTallyShared of_tally;
    const AdamwCoefficients c = *coefficients;
    if (c.step == 0.0f) {
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
    const Moments<kFp8> moments(p, first);
#pragma unroll 1
    for (int row = 0; row < kMxSquareRows; row += kRowsAtOnce) {
        float4 g[kRowsAtOnce], w[kRowsAtOnce];
        typename Moments<kFp8>::Stored stored_m[kRowsAtOnce], stored_v[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const uint64 at = static_cast<uint64>(row + i) * columns;
            g[i] = *reinterpret_cast<const float4*>(gradients + at);
            w[i] = *reinterpret_cast<const float4*>(masters + at);
            moments.load(at, stored_m[i], stored_v[i]);
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const uint64 at = static_cast<uint64>(row + i) * columns;
            float4 m = moments.first_of(stored_m[i]);
            float4 v = moments.second_of(stored_v[i]);
            adamw_update(g[i], w[i], m, v, decay, c);
            *reinterpret_cast<float4*>(masters + at) = w[i];
            moments.store(at, m, v, first, static_cast<uint32>(p.index), c.step);
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

// table [parameters], one CTA per square; coefficients [1]. Moments in FP32.
extern "C" __global__ void __launch_bounds__(kMxSquareThreads, 2)
    adamw_quantize(const SquareParameter* __restrict__ table, uint32 parameters,
                   const AdamwCoefficients* __restrict__ coefficients) {
    update_square<false>(table, parameters, coefficients);
}

// The same with moments in eight bits.
extern "C" __global__ void __launch_bounds__(kMxSquareThreads, 2)
    adamw_quantize_fp8(const SquareParameter* __restrict__ table, uint32 parameters,
                       const AdamwCoefficients* __restrict__ coefficients) {
    update_square<true>(table, parameters, coefficients);
}
