// SwiGLU and the block quantization of its result to MXFP8, and its backward with that of both
// gradients: data and scales along rows, down columns, or both, and their counters. The results
// have the bits of `swiglu.cu`; how the work is split in `layout/elementwise_quantize.cuh`.
//
// The backward has a tile of each gradient in shared memory and quantizes one after the other:
// dout, gate and up are read once for both.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/activation.cuh"
#include "common/types.cuh"
#include "layout/elementwise_quantize.cuh"

// Steps of the backward whose loads, three each, a thread starts together.
constexpr int kBackwardTogether = 2;

// gate, up, out [rows, columns], 16-byte aligned, columns a multiple of 8; out may be null.
// Outputs as in `MxTarget`; statistics [6]. A CTA for each tile, one at least.
#define FORWARD_KERNEL(name, row, column)                                                        \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ gate, const bf16* __restrict__ up, bf16* __restrict__ out, \
             uint8* __restrict__ data, uint8* __restrict__ scales, uint8* __restrict__ data_t,   \
             uint8* __restrict__ scales_t, uint32 rows, uint32 columns, uint32 flags,            \
             MxTotals* totals, uint64* statistics) {                                             \
        const bf16* const sources[2] = {gate, up};                                               \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        elementwise_quantize<row, column>(                                                       \
            sources, out, to, flags, totals, statistics,                                         \
            [](const float(&of)[2]) { return swiglu(of[0], of[1]); });                           \
    }

FORWARD_KERNEL(swiglu_quantize_row, true, false)
FORWARD_KERNEL(swiglu_quantize_column, false, true)
FORWARD_KERNEL(swiglu_quantize_both, true, true)

// A gradient and where it goes.
struct Gradient {
    bf16* values;  // null where nobody reads it
    MxTarget to;
    uint32 flags;
    MxTotals* totals;
    uint64* statistics;
};

// What the backward reads.
struct BackwardSources {
    const bf16* __restrict__ dout;
    const bf16* __restrict__ gate;
    const bf16* __restrict__ up;
};

struct GradientVectors {
    uint4 gate;
    uint4 up;
};

__device__ __forceinline__ GradientVectors gradient_vectors(const uint4& dout, const uint4& gate,
                                                          const uint4& up) {
    float d[8], g[8], u[8];
    unpack_bf16x8(dout, d);
    unpack_bf16x8(gate, g);
    unpack_bf16x8(up, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const SwigluGradients gradients = swiglu_gradients(d[j], g[j], u[j]);
        g[j] = gradients.gate;
        u[j] = gradients.up;
    }
    return {pack_bf16x8(g), pack_bf16x8(u)};
}

// A tile of `layout/mx_plain_tile.cuh`: a thread lays both gradients aside in shared memory, in
// places that nobody else looks at, and takes them back one after the other. Those of the first
// are free when all have it, and become the stage.
template <bool kWide, bool kRow, bool kColumn>
__device__ __forceinline__ void backward_plain(const BackwardSources& from, const Gradient& dgate,
                                               const Gradient& dup, uint4* dynamic,
                                               MxPlainShared& shared, MxTally& gate_tally,
                                               MxTally& up_tally) {
    uint4* const stage = dynamic;
    uint4* const own_gate = dynamic + threadIdx.x;
    uint4* const own_up = own_gate + ElementTile::kTileBytes / 16;
    const uint32 columns = dgate.to.columns, across = columns / kMxTile;
    const uint32 row0 = blockIdx.x / across * kMxTile, column0 = blockIdx.x % across * kMxTile;
    const uint64 first =
        static_cast<uint64>(row0 + mx_plain_row()) * columns + column0 + mx_plain_column();
#pragma unroll 1
    for (int row = 0; row < kMxPlainRows; row += kBackwardTogether) {
        uint4 vectors[kBackwardTogether][3];
#pragma unroll
        for (int i = 0; i < kBackwardTogether; ++i) {
            const uint64 place = first + static_cast<uint64>(row + i) * columns;
            vectors[i][0] = *reinterpret_cast<const uint4*>(from.dout + place);
            vectors[i][1] = *reinterpret_cast<const uint4*>(from.gate + place);
            vectors[i][2] = *reinterpret_cast<const uint4*>(from.up + place);
        }
#pragma unroll
        for (int i = 0; i < kBackwardTogether; ++i) {
            const GradientVectors of =
                gradient_vectors(vectors[i][0], vectors[i][1], vectors[i][2]);
            const uint64 place = first + static_cast<uint64>(row + i) * columns;
            if (dgate.values != nullptr) {
                *reinterpret_cast<uint4*>(dgate.values + place) = of.gate;
            }
            if (dup.values != nullptr) {
                *reinterpret_cast<uint4*>(dup.values + place) = of.up;
            }
            own_gate[(row + i) * kMxPlainThreads] = of.gate;
            own_up[(row + i) * kMxPlainThreads] = of.up;
        }
    }
    uint4 gradients[kMxPlainRows];
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
        gradients[row] = own_gate[row * kMxPlainThreads];
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(gradients, row0, column0, dgate.to, stage, shared,
                                             gate_tally);
#pragma unroll
    for (int row = 0; row < kMxPlainRows; ++row) {
        gradients[row] = own_up[row * kMxPlainThreads];
    }
    mx_quantize_vectors<kWide, kRow, kColumn>(gradients, row0, column0, dup.to, stage, shared,
                                             up_tally);
}

// Any tile.
template <bool kRow, bool kColumn>
__device__ __forceinline__ void backward_tile(const BackwardSources& from, const Gradient& dgate,
                                              const Gradient& dup, uint4* dynamic,
                                              MxTally& gate_tally, MxTally& up_tally) {
    uint32* const gate_tile = reinterpret_cast<uint32*>(dynamic);
    uint32* const up_tile = gate_tile + ElementTile::kTileBytes / 4;
    __shared__ MxShared shared;
    MxCounters gate_counters, up_counters;
    if (blockIdx.x < ElementPlaces::tiles(dgate.to)) {
        const ElementPlaces places(blockIdx.x, dgate.to);
#pragma unroll 1
        for (int step = 0; step < kMxSteps; ++step) {
            const GradientVectors of =
                gradient_vectors(places.load(from.dout, step), places.load(from.gate, step),
                                places.load(from.up, step));
            if (dgate.values != nullptr) {
                places.store(dgate.values, step, of.gate);
            }
            if (dup.values != nullptr) {
                places.store(dup.values, step, of.up);
            }
            mx_vector<bf16>(gate_tile, step) = of.gate;
            mx_vector<bf16>(up_tile, step) = of.up;
        }
        mx_quantize_tile<bf16, kRow, kColumn>(places.row0, places.column0, dgate.to, dgate.flags,
                                              gate_tile, shared, gate_counters);
        // What the tiles share is read to the end.
        __syncthreads();
        mx_quantize_tile<bf16, kRow, kColumn>(places.row0, places.column0, dup.to, dup.flags,
                                              up_tile, shared, up_counters);
    }
    gate_tally.leave(gate_counters);
    up_tally.leave(up_counters);
    __syncthreads();
    gate_tally.give();
    up_tally.give();
}

template <bool kRow, bool kColumn>
__device__ __forceinline__ void backward(const BackwardSources& from, const Gradient& dgate,
                                         const Gradient& dup) {
    extern __shared__ uint4 dynamic[];
    __shared__ MxPlainShared shared;
    __shared__ MxTallyShared of_tallies[2];
    MxTally gate_tally(of_tallies[0], dgate.totals), up_tally(of_tallies[1], dup.totals);
    const MxTarget& to = dgate.to;
    const bool wide = dgate.flags & kMxWide;
    if (!mx_is_plain(to, dgate.flags | dup.flags) || wide != ((dup.flags & kMxWide) != 0)) {
        backward_tile<kRow, kColumn>(from, dgate, dup, dynamic, gate_tally, up_tally);
    } else if (wide) {
        backward_plain<true, kRow, kColumn>(from, dgate, dup, dynamic, shared, gate_tally,
                                            up_tally);
    } else {
        backward_plain<false, kRow, kColumn>(from, dgate, dup, dynamic, shared, gate_tally,
                                             up_tally);
    }
    const uint64 elements =
        static_cast<uint64>((kRow ? 1 : 0) + (kColumn ? 1 : 0)) * to.rows * to.columns;
    gate_tally.finish(gridDim.x, elements, dgate.statistics);
    up_tally.finish(gridDim.x, elements, dup.statistics);
}

// dout, gate, up, dgate, dup [rows, columns], 16-byte aligned, columns a multiple of 8; dgate and
// dup may be null. The quantized operands of dgate, then those of dup; flags of each; totals [2],
// statistics [6] of each. A CTA for each tile, one at least.
#define BACKWARD_KERNEL(name, row, column)                                                       \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ dout, const bf16* __restrict__ gate,                       \
             const bf16* __restrict__ up, bf16* dgate, bf16* dup, uint8* gate_data,              \
             uint8* gate_scales, uint8* gate_data_t, uint8* gate_scales_t, uint8* up_data,       \
             uint8* up_scales, uint8* up_data_t, uint8* up_scales_t, uint32 rows,                \
             uint32 columns, uint32 gate_flags, uint32 up_flags, MxTotals* totals,               \
             uint64* gate_statistics, uint64* up_statistics) {                                   \
        const Gradient of_gate = {                                                               \
            dgate,                                                                               \
            {gate_data, gate_scales, gate_data_t, gate_scales_t, rows, columns},                 \
            gate_flags,                                                                          \
            totals,                                                                              \
            gate_statistics};                                                                    \
        const Gradient of_up = {dup,                                                             \
                                {up_data, up_scales, up_data_t, up_scales_t, rows, columns},     \
                                up_flags,                                                        \
                                totals + 1,                                                      \
                                up_statistics};                                                  \
        backward<row, column>({dout, gate, up}, of_gate, of_up);                                 \
    }

BACKWARD_KERNEL(swiglu_backward_quantize_row, true, false)
BACKWARD_KERNEL(swiglu_backward_quantize_column, false, true)
BACKWARD_KERNEL(swiglu_backward_quantize_both, true, true)
