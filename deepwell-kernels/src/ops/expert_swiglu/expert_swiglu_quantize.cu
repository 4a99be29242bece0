// `expert_swiglu.cu` and the block quantization of its result to MXFP8, and its backward with that
// of both gradients: data and scales along rows, down columns, or both, and their counters. The
// results have the bits of `expert_swiglu.cu`; how the work is split in `layout/row_quantize.cuh`
// and `layout/gradient_pair_quantize.cuh`.
//
// dgates of a row is summed over the tiles of the row: each leaves its part in `parts`, and
// `expert_swiglu_dgates`, launched behind, adds the parts in the order of the columns.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/expert_activation.cuh"
#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "layout/row_quantize.cuh"

constexpr uint32 kGateThreads = 256;

// What a row has of the router.
struct GatedRow {
    float factor;
    bool exists;  // whether it has a pair
};

// Of the rows of a tile, for all threads.
__device__ __forceinline__ void load_gated_rows(GatedRow (&of_tile)[kMxTile],
                                                const float* __restrict__ gates,
                                                const int32* __restrict__ pairs, uint32 row0,
                                                uint32 rows) {
    if (threadIdx.x < kMxTile) {
        const uint32 row = row0 + threadIdx.x;
        const int32 pair = row < rows ? pairs[row] : -1;
        of_tile[threadIdx.x] = {pair < 0 ? 0.0f : gates[pair], pair >= 0};
    }
    __syncthreads();
}

// As `Rows` of `layout/row_quantize.cuh`.
template <typename Activation>
struct ActivatedRows {
    struct Loaded {
        uint4 gate;
        uint4 up;
    };
    Activation activation;
    const bf16* __restrict__ gate;
    const bf16* __restrict__ up;
    const GatedRow* of_tile;
    uint32 columns;

    // Rows without a pair may hold anything.
    __device__ __forceinline__ Loaded load(uint32 in_tile, const ElementPlace& place) const {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        return of_tile[in_tile].exists
                   ? Loaded{load_vector(gate, place, columns), load_vector(up, place, columns)}
                   : Loaded{zero, zero};
    }
    __device__ __forceinline__ uint4 result(const Loaded& loaded, uint32 in_tile) const {
        const GatedRow row = of_tile[in_tile];
        float g[8], u[8];
        unpack_bf16x8(loaded.gate, g);
        unpack_bf16x8(loaded.up, u);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            g[i] = activation(g[i], u[i]).value * row.factor;
        }
        return row.exists ? pack_bf16x8(g) : make_uint4(0, 0, 0, 0);
    }
};

// As `Gradients` of `layout/gradient_pair_quantize.cuh`.
template <typename Activation>
struct ActivatedRowsGradients {
    Activation activation;
    const bf16* __restrict__ dout;
    const bf16* __restrict__ gate;
    const bf16* __restrict__ up;
    const GatedRow* of_tile;
    float* parts;  // of the rows of the tile
    uint32 rows;   // of the tile that exist
    uint32 columns;

    __device__ __forceinline__ PairSources load(uint32 in_tile, const ElementPlace& place) const {
        PairSources sources;
        if (of_tile[in_tile].exists) {
            sources.dout = load_vector(dout, place, columns);
            sources.gate = load_vector(gate, place, columns);
            sources.up = load_vector(up, place, columns);
        }
        return sources;
    }
    __device__ __forceinline__ GradientVectors result(const PairSources& sources,
                                                      uint32 in_tile) const {
        const GatedRow row = of_tile[in_tile];
        float d[8], g[8], u[8], part = 0.0f;
        unpack_bf16x8(sources.dout, d);
        unpack_bf16x8(sources.gate, g);
        unpack_bf16x8(sources.up, u);
        expert_gradients(activation, d, row.factor, g, u, part);
#pragma unroll
        for (uint32 distance = kMxRowLanes / 2; distance > 0; distance /= 2) {
            part += __shfl_xor_sync(0xffffffffu, part, distance);
        }
        if (threadIdx.x % kMxRowLanes == 0 && in_tile < rows) {
            parts[in_tile] = part;
        }
        return row.exists ? GradientVectors{pack_bf16x8(g), pack_bf16x8(u)} : GradientVectors();
    }
};

// gate, up, out [rows, columns], gates [tokens, top_k], pairs [rows]; 16-byte aligned, columns a
// multiple of 8; out may be null. Outputs as in `MxTarget`; statistics [6]. `alpha` and `limit` are
// of the clamped activation. A CTA for each tile, one at least.
#define FORWARD_KERNEL(name, row, column, Activation, ...)                                       \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ gate, const bf16* __restrict__ up,                         \
             const float* __restrict__ gates, const int32* __restrict__ pairs,                   \
             bf16* __restrict__ out, uint8* __restrict__ data, uint8* __restrict__ scales,       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics, float alpha,    \
             float limit) {                                                                      \
        __shared__ GatedRow of_tile[kMxTile];                                                    \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        const ElementPlaces places(blockIdx.x, to);                                              \
        load_gated_rows(of_tile, gates, pairs, places.row0, rows);                               \
        row_quantize<row, column>(                                                               \
            ActivatedRows<Activation>{Activation{__VA_ARGS__}, gate, up, of_tile, columns},      \
            places, out, to, flags, totals, statistics);                                         \
    }

// dout, gate, up, dgate, dup [rows, columns], gates [tokens, top_k], pairs [rows]; 16-byte aligned,
// columns a multiple of 8; dgate and dup may be null. The quantized operands of dgate, then those
// of dup; flags of each; totals [2], statistics [6] of each; parts [tiles of a row, rows].
#define BACKWARD_KERNEL(name, row, column, Activation, ...)                                      \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ dout, const bf16* __restrict__ gate,                       \
             const bf16* __restrict__ up, const float* __restrict__ gates,                       \
             const int32* __restrict__ pairs, bf16* dgate, bf16* dup, uint8* gate_data,          \
             uint8* gate_scales, uint8* gate_data_t, uint8* gate_scales_t, uint8* up_data,       \
             uint8* up_scales, uint8* up_data_t, uint8* up_scales_t, uint32 rows,                \
             uint32 columns, uint32 gate_flags, uint32 up_flags, MxTotals* totals,               \
             uint64* gate_statistics, uint64* up_statistics, float* parts, float alpha,          \
             float limit) {                                                                      \
        __shared__ GatedRow of_tile[kMxTile];                                                    \
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
        const ElementPlaces places(blockIdx.x, of_gate.to);                                      \
        load_gated_rows(of_tile, gates, pairs, places.row0, rows);                               \
        float* const own_parts =                                                                 \
            parts + static_cast<uint64>(places.column0 / kMxTile) * rows + places.row0;          \
        gradient_pair_quantize<row, column>(                                                     \
            ActivatedRowsGradients<Activation>{Activation{__VA_ARGS__}, dout, gate, up, of_tile, \
                                               own_parts, rows - places.row0, columns},          \
            places, of_gate, of_up);                                                             \
    }

FORWARD_KERNEL(expert_swiglu_quantize_row, true, false, Plain)
FORWARD_KERNEL(expert_swiglu_quantize_column, false, true, Plain)
FORWARD_KERNEL(expert_swiglu_quantize_both, true, true, Plain)
FORWARD_KERNEL(expert_swiglu_clamped_quantize_row, true, false, Clamped, alpha, limit)
FORWARD_KERNEL(expert_swiglu_clamped_quantize_column, false, true, Clamped, alpha, limit)
FORWARD_KERNEL(expert_swiglu_clamped_quantize_both, true, true, Clamped, alpha, limit)
BACKWARD_KERNEL(expert_swiglu_backward_quantize_row, true, false, Plain)
BACKWARD_KERNEL(expert_swiglu_backward_quantize_column, false, true, Plain)
BACKWARD_KERNEL(expert_swiglu_backward_quantize_both, true, true, Plain)
BACKWARD_KERNEL(expert_swiglu_clamped_backward_quantize_row, true, false, Clamped, alpha, limit)
BACKWARD_KERNEL(expert_swiglu_clamped_backward_quantize_column, false, true, Clamped, alpha, limit)
BACKWARD_KERNEL(expert_swiglu_clamped_backward_quantize_both, true, true, Clamped, alpha, limit)

// parts [tiles, rows], pairs [rows], row_of_pairs and dgates [tokens, top_k].
extern "C" __global__ void __launch_bounds__(kGateThreads)
    expert_swiglu_dgates(const float* __restrict__ parts, const int32* __restrict__ row_of_pairs,
                         const int32* __restrict__ pairs, float* __restrict__ dgates, uint32 rows,
                         uint32 tiles, uint32 pair_count) {
    const uint32 first = blockIdx.x * kGateThreads + threadIdx.x;
    const uint32 stride = gridDim.x * kGateThreads;
    for (uint32 pair = first; pair < pair_count; pair += stride) {
        if (row_of_pairs[pair] < 0) {
            dgates[pair] = 0.0f;
        }
    }
    for (uint32 row = first; row < rows; row += stride) {
        const int32 pair = pairs[row];
        if (pair < 0) {
            continue;
        }
        float dot = 0.0f;
#pragma unroll 4
        for (uint32 tile = 0; tile < tiles; ++tile) {
            dot += parts[static_cast<uint64>(tile) * rows + row];
        }
        dgates[pair] = dot;
    }
}
