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
#include "ptx/cp_async.cuh"

constexpr uint32 kGateThreads = 256;

// What a row has of the router.
struct GatedRow {
    float factor;
    bool exists;  // whether it has a pair
};

// What a CTA is told of the rows of its tiles.
struct GatedTiles {
    GatedRow rows[2][kMxTile];  // of this tile and the next
    int32 pairs[kMxTile];       // of the tile behind the next
};

// What rows have of the router, a tile ahead, and their pairs, two tiles ahead: a gate is read
// where a pair says. Thread i of the first 128 has row i, which nobody else touches before a
// barrier.
class GatedRows {
    GatedTiles& tiles_;
    const float* __restrict__ gates_;
    const int32* __restrict__ pairs_;
    uint32 now_ = 0;

    static __device__ __forceinline__ uint32 shared(const void* place) {
        return static_cast<uint32>(__cvta_generic_to_shared(place));
    }

  public:
    __device__ __forceinline__ GatedRows(GatedTiles& tiles, const float* gates,
                                         const int32* pairs)
        : tiles_(tiles), gates_(gates), pairs_(pairs) {}

    __device__ __forceinline__ const GatedRow& operator[](uint32 in_tile) const {
        return tiles_.rows[now_][in_tile];
    }
    // Of the next tile, for the thread that has the row.
    __device__ __forceinline__ bool next_exists() const {
        return tiles_.rows[now_ ^ 1][threadIdx.x].exists;
    }

    __device__ __forceinline__ void begin(const ElementPlaces& first,
                                          const ElementPlaces& second) {
        if (threadIdx.x < kMxTile) {
            const uint32 row = first.row0 + threadIdx.x;
            const int32 pair = row < first.rows ? pairs_[row] : -1;
            tiles_.rows[0][threadIdx.x] = {pair < 0 ? 0.0f : gates_[pair], pair >= 0};
            if (second.any() && second.row0 + threadIdx.x < second.rows) {
                tiles_.pairs[threadIdx.x] = pairs_[second.row0 + threadIdx.x];
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ void ask(const ElementPlaces& next, const ElementPlaces& after) {
        if (threadIdx.x < kMxTile) {
            int32& own = tiles_.pairs[threadIdx.x];
            if (next.any()) {
                const int32 pair = own;
                GatedRow& row = tiles_.rows[now_ ^ 1][threadIdx.x];
                row.exists = pair >= 0;
                cp_async_4(shared(&row.factor), gates_ + max(pair, 0), pair < 0 ? 0 : 4);
            }
            if (after.any()) {
                cp_async_4(shared(&own), pairs_ + after.row0 + threadIdx.x, 4);
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void take() {
        cp_async_wait<0>();
    }
    __device__ __forceinline__ void advance() {
        now_ ^= 1;
    }
};

// As `Rows` of `layout/row_quantize.cuh`.
template <typename Activation>
struct ActivatedRows {
    struct Loaded {
        uint4 gate;
        uint4 up;
    };
    static constexpr bool kWalks = true;
    static constexpr int kTogether = 4;
    Activation activation;
    const bf16* __restrict__ gate;
    const bf16* __restrict__ up;
    GatedRows of_rows;
    uint32 columns;

    __device__ __forceinline__ void begin(const ElementPlaces& first,
                                          const ElementPlaces& second) {
        of_rows.begin(first, second);
    }
    __device__ __forceinline__ void ask(const ElementPlaces& next, const ElementPlaces& after) {
        of_rows.ask(next, after);
    }
    __device__ __forceinline__ void take(const ElementPlaces& next) {
        of_rows.take();
        if (threadIdx.x < kMxTile && next.any() && of_rows.next_exists()) {
            const uint32 row = next.row0 + threadIdx.x;
            prefetch_row(gate, row, next.column0, columns);
            prefetch_row(up, row, next.column0, columns);
        }
    }
    __device__ __forceinline__ void advance() {
        of_rows.advance();
    }

    // Rows without a pair may hold anything.
    __device__ __forceinline__ Loaded load(uint32 in_tile, const ElementPlace& place) const {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        return of_rows[in_tile].exists
                   ? Loaded{load_vector(gate, place, columns), load_vector(up, place, columns)}
                   : Loaded{zero, zero};
    }
    __device__ __forceinline__ uint4 result(const Loaded& loaded, uint32 in_tile) const {
        const GatedRow row = of_rows[in_tile];
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
    static constexpr bool kWalks = true;
    Activation activation;
    const bf16* __restrict__ dout;
    const bf16* __restrict__ gate;
    const bf16* __restrict__ up;
    GatedRows of_rows;
    float* parts;  // [tiles of a row, rows]
    uint32 columns;

    __device__ __forceinline__ void begin(const ElementPlaces& first,
                                          const ElementPlaces& second) {
        of_rows.begin(first, second);
    }
    __device__ __forceinline__ void ask(const ElementPlaces& next, const ElementPlaces& after) {
        of_rows.ask(next, after);
    }
    __device__ __forceinline__ void take(const ElementPlaces& next) {
        of_rows.take();
        if (threadIdx.x < kMxTile && next.any() && of_rows.next_exists()) {
            const uint32 row = next.row0 + threadIdx.x;
            prefetch_row(dout, row, next.column0, columns);
            prefetch_row(gate, row, next.column0, columns);
            prefetch_row(up, row, next.column0, columns);
        }
    }
    __device__ __forceinline__ void advance() {
        of_rows.advance();
    }

    __device__ __forceinline__ PairSources load(uint32 in_tile, const ElementPlace& place) const {
        PairSources sources;
        if (of_rows[in_tile].exists) {
            sources.dout = load_vector(dout, place, columns);
            sources.gate = load_vector(gate, place, columns);
            sources.up = load_vector(up, place, columns);
        }
        return sources;
    }
    __device__ __forceinline__ GradientVectors result(const ElementPlaces& tile,
                                                      const PairSources& sources,
                                                      uint32 in_tile) const {
        const GatedRow row = of_rows[in_tile];
        float d[8], g[8], u[8], part = 0.0f;
        unpack_bf16x8(sources.dout, d);
        unpack_bf16x8(sources.gate, g);
        unpack_bf16x8(sources.up, u);
        expert_gradients(activation, d, row.factor, g, u, part);
#pragma unroll
        for (uint32 distance = kMxRowLanes / 2; distance > 0; distance /= 2) {
            part += __shfl_xor_sync(0xffffffffu, part, distance);
        }
        const uint32 at = tile.row0 + in_tile;
        if (threadIdx.x % kMxRowLanes == 0 && at < tile.rows) {
            parts[static_cast<uint64>(tile.column0 / kMxTile) * tile.rows + at] = part;
        }
        return row.exists ? GradientVectors{pack_bf16x8(g), pack_bf16x8(u)} : GradientVectors();
    }
};

// gate, up, out [rows, columns], gates [tokens, top_k], pairs [rows]; 16-byte aligned, columns a
// multiple of 8; out may be null. Outputs as in `MxTarget`; statistics [6]. `alpha` and `limit` are
// of the clamped activation. CTAs as `row_quantize` has them.
#define FORWARD_KERNEL(name, row, column, Activation, ...)                                       \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 4)                       \
        name(const bf16* __restrict__ gate, const bf16* __restrict__ up,                         \
             const float* __restrict__ gates, const int32* __restrict__ pairs,                   \
             bf16* __restrict__ out, uint8* __restrict__ data, uint8* __restrict__ scales,       \
             uint8* __restrict__ data_t, uint8* __restrict__ scales_t, uint32 rows,              \
             uint32 columns, uint32 flags, MxTotals* totals, uint64* statistics, float alpha,    \
             float limit) {                                                                      \
        __shared__ GatedTiles tiles;                                                             \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        row_quantize<row, column>(                                                               \
            ActivatedRows<Activation>{Activation{__VA_ARGS__}, gate, up,                         \
                                      GatedRows(tiles, gates, pairs), columns},                  \
            0, out, to, flags, totals, statistics);                                              \
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
        __shared__ GatedTiles tiles;                                                             \
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
        gradient_pair_quantize<row, column>(                                                     \
            ActivatedRowsGradients<Activation>{Activation{__VA_ARGS__}, dout, gate, up,          \
                                               GatedRows(tiles, gates, pairs), parts, columns},  \
            of_gate, of_up);                                                                     \
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
