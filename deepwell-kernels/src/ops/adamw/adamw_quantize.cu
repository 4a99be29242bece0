// AdamW over weights that are quantized to MXFP8 in the same pass: squares of 128 x 128 elements
// share a scale by the RCEIL rule, data and scales along rows, down columns (stored transposed), or
// both.
//
// Each element is updated as in `adamw.cu`, `adamw_fp8.cu` or `adamw_bf16.cu` and then quantized as
// in `quantize_square.cu`, bit by bit, without reading the new weight again. A CTA has one square.
// A thread has 16 rows of four columns, in the layout of `layout/mx_square_tile.cuh`, and processes
// a few rows at a time: all loads of these rows are in flight before the first value is used. Each
// thread keeps its new weights in its own part of shared memory until the largest magnitude of the
// square is known.
//
// A step whose norm is not finite changes nothing.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/adamw.cuh"
#include "common/adamw_bf16.cuh"
#include "layout/adamw_fp8.cuh"
#include "layout/adamw_roots.cuh"
#include "common/types.cuh"
#include "layout/mx_layout.cuh"
#include "layout/mx_square_tile.cuh"
#include "layout/mx_statistics.cuh"

// A parameter of the list: contiguous non-empty matrices of whole squares, each quantized
// separately. All addresses are 16-byte aligned; operands that are not requested are null.
struct SquareParameter {
    const float* gradient;
    void* master;        // FP32 or BF16
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

// Both moments of weights, from the thread's first element on. `at` is the distance of a row.
struct WideMoments {
    using Stored = float4;
    float* first;
    float* second;

    __device__ __forceinline__ WideMoments(const SquareParameter& p, uint64 begin)
        : first(static_cast<float*>(p.first_moment) + begin),
          second(static_cast<float*>(p.second_moment) + begin) {
    }
    __device__ __forceinline__ void load(uint64 at, Stored& m, Stored& v) const {
        m = *reinterpret_cast<const float4*>(first + at);
        v = *reinterpret_cast<const float4*>(second + at);
    }
    // Updates four weights; what `store` takes remains in `m` and `v`.
    static __device__ __forceinline__ void update(const float4& g, float4& w, const Stored& old_m,
                                                  const Stored& old_v, float4& m, float4& v,
                                                  float decay, const AdamwCoefficients& c) {
        m = old_m;
        v = old_v;
        adamw_update(g, w, m, v, decay, c);
    }
    __device__ __forceinline__ void store(uint64 at, const float4& m, const float4& v, uint64,
                                          uint32, float) const {
        *reinterpret_cast<float4*>(first + at) = m;
        *reinterpret_cast<float4*>(second + at) = v;
    }
};

struct NarrowMoments {
    using Stored = MomentQuad;
    uint8* first;
    uint8* second;

    __device__ __forceinline__ NarrowMoments(const SquareParameter& p, uint64 begin)
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
    static __device__ __forceinline__ void update(const float4& g, float4& w, const Stored& old_m,
                                                  const Stored& old_v, float4& m, float4& root,
                                                  float decay, const AdamwCoefficients& c) {
        m = moment_decode(old_m);
        float4 v = moment_squares(moment_decode(old_v));
        root = adamw_update_with_roots(g, w, m, v, decay, c);
    }
    __device__ __forceinline__ void store(uint64 at, const float4& m, const float4& root,
                                          uint64 begin, uint32 parameter, float step) const {
        moments_store(first + block_at(at), second + block_at(at), threadIdx.x % 32, m, root,
                      (begin + at) / 4, parameter, step);
    }
};

static_assert(kMxSquareLanes == 32 && kMxTile == kMomentBlock, "a warp has a block of a row");

// Master weights, likewise. `store` returns the weights as they are stored.
struct WideMasters {
    static constexpr int kRowsAtOnce = 4;  // rows that a thread processes at a time
    using Stored = float4;
    float* masters;

    __device__ __forceinline__ WideMasters(const SquareParameter& p, uint64 begin)
        : masters(static_cast<float*>(p.master) + begin) {
    }
    __device__ __forceinline__ float4 load(uint64 at) const {
        return *reinterpret_cast<const float4*>(masters + at);
    }
    static __device__ __forceinline__ float4 widen(const float4& w) {
        return w;
    }
    __device__ __forceinline__ float4 store(uint64 at, const float4& w, uint64, uint32,
                                            float) const {
        *reinterpret_cast<float4*>(masters + at) = w;
        return w;
    }
};

struct NarrowMasters {
    static constexpr int kRowsAtOnce = 2;  // random words take the registers of the others
    using Stored = uint2;
    bf16* masters;

    __device__ __forceinline__ NarrowMasters(const SquareParameter& p, uint64 begin)
        : masters(static_cast<bf16*>(p.master) + begin) {
    }
    __device__ __forceinline__ uint2 load(uint64 at) const {
        return *reinterpret_cast<const uint2*>(masters + at);
    }
    static __device__ __forceinline__ float4 widen(const uint2& w) {
        return master_widen(w);
    }
    __device__ __forceinline__ float4 store(uint64 at, const float4& w, uint64 begin,
                                            uint32 parameter, float step) const {
        const uint2 rounded =
            master_round(w, master_words((begin + at) / 4, parameter, step));
        *reinterpret_cast<uint2*>(masters + at) = rounded;
        return master_widen(rounded);
    }
};

template <typename Masters, typename Moments>
__device__ __forceinline__ void update_square(const SquareParameter* __restrict__ table,
                                              uint32 parameters,
                                              const AdamwCoefficients* __restrict__ coefficients) {
    constexpr int kRowsAtOnce = Masters::kRowsAtOnce;
    static_assert(kMxSquareRows % kRowsAtOnce == 0, "rows at once divide a tile");
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
    const Masters masters(p, first);
    const Moments moments(p, first);
    const uint32 index = static_cast<uint32>(p.index);
#pragma unroll 1
    for (int row = 0; row < kMxSquareRows; row += kRowsAtOnce) {
        float4 g[kRowsAtOnce];
        typename Masters::Stored stored_w[kRowsAtOnce];
        typename Moments::Stored stored_m[kRowsAtOnce], stored_v[kRowsAtOnce];
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const uint64 at = static_cast<uint64>(row + i) * columns;
            g[i] = *reinterpret_cast<const float4*>(gradients + at);
            stored_w[i] = masters.load(at);
            moments.load(at, stored_m[i], stored_v[i]);
        }
#pragma unroll
        for (int i = 0; i < kRowsAtOnce; ++i) {
            const uint64 at = static_cast<uint64>(row + i) * columns;
            float4 w = Masters::widen(stored_w[i]), m, v;
            Moments::update(g[i], w, stored_m[i], stored_v[i], m, v, decay, c);
            w = masters.store(at, w, first, index, c.step);
            moments.store(at, m, v, first, index, c.step);
            weights[(row + i) * kMxSquareThreads + threadIdx.x] =
                make_uint4(__float_as_uint(w.x), __float_as_uint(w.y), __float_as_uint(w.z),
                           __float_as_uint(w.w));
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

// table [parameters], one CTA per square; coefficients [1].
#define KERNEL(name, masters, moments)                                            \
    extern "C" __global__ void __launch_bounds__(kMxSquareThreads, 2)             \
        name(const SquareParameter* __restrict__ table, uint32 parameters,        \
             const AdamwCoefficients* __restrict__ coefficients) {                \
        update_square<masters, moments>(table, parameters, coefficients);         \
    }

KERNEL(adamw_quantize, WideMasters, WideMoments)
KERNEL(adamw_quantize_fp8, WideMasters, NarrowMoments)
KERNEL(adamw_bf16_quantize, NarrowMasters, WideMoments)
KERNEL(adamw_bf16_quantize_fp8, NarrowMasters, NarrowMoments)
