// Routing data of rows of a mixture of experts, prefetched one tile ahead, and the rows and
// gradients of the activation between the GEMMs of experts.
#pragma once

#include "common/bf16x8.cuh"
#include "common/expert_activation.cuh"
#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "layout/row_quantize.cuh"
#include "ptx/cp_async.cuh"

// Routing data of a row.
struct GatedRow {
    float factor;
    bool exists;  // whether it has a pair
};

// Routing data of the rows of a CTA's tiles, in shared memory.
struct GatedTiles {
    GatedRow rows[2][kMxTile];  // of the current tile and the next
    int32 pairs[2][kMxTile];    // of the next tile and the tile after the next
};

// Prefetches routing data of rows one tile ahead, and pairs two tiles ahead, as a pair is the index
// into the gates. Thread i of the first 128 owns row i; other threads access row i only after a
// barrier.
class GatedRows {
    GatedTiles& tiles_;
    const float* __restrict__ gates_;
    const int32* __restrict__ pairs_;
    uint32 now_ = 0;

    static __device__ __forceinline__ uint32 shared(const void* place) {
        return static_cast<uint32>(__cvta_generic_to_shared(place));
    }

    static __device__ __forceinline__ bool is_of_row() {
        return threadIdx.x < kMxTile && threadIdx.y == 0;
    }

  public:
    __device__ __forceinline__ GatedRows(GatedTiles& tiles, const float* gates,
                                         const int32* pairs)
        : tiles_(tiles), gates_(gates), pairs_(pairs) {}

    __device__ __forceinline__ const GatedRow& operator[](uint32 in_tile) const {
        return tiles_.rows[now_][in_tile];
    }
    // Row of the next tile; valid after `ask` and a barrier.
    __device__ __forceinline__ bool next_exists(uint32 in_tile) const {
        return tiles_.rows[now_ ^ 1][in_tile].exists;
    }

    __device__ __forceinline__ void begin(const ElementPlaces& first,
                                          const ElementPlaces& second) {
        if (is_of_row()) {
            const uint32 row = first.row0 + threadIdx.x;
            const int32 pair = row < first.rows ? pairs_[row] : -1;
            tiles_.rows[0][threadIdx.x] = {pair < 0 ? 0.0f : gates_[pair], pair >= 0};
            if (second.any() && second.row0 + threadIdx.x < second.rows) {
                tiles_.pairs[1][threadIdx.x] = pairs_[second.row0 + threadIdx.x];
            }
        }
        __syncthreads();
    }
    // Issues copies; the caller commits and waits for the copies, and adds a barrier.
    __device__ __forceinline__ void ask(const ElementPlaces& next, const ElementPlaces& after) {
        if (is_of_row()) {
            if (next.any()) {
                const int32 pair = tiles_.pairs[now_ ^ 1][threadIdx.x];
                GatedRow& row = tiles_.rows[now_ ^ 1][threadIdx.x];
                row.exists = pair >= 0;
                cp_async_4(shared(&row.factor), gates_ + max(pair, 0), pair < 0 ? 0 : 4);
            }
            if (after.any()) {
                cp_async_4(shared(&tiles_.pairs[now_][threadIdx.x]),
                           pairs_ + after.row0 + threadIdx.x, 4);
            }
        }
    }
    __device__ __forceinline__ void advance() {
        now_ ^= 1;
    }
};

// `Rows` of `layout/row_quantize.cuh`.
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
        cp_async_commit();
    }
    __device__ __forceinline__ void take() {
        cp_async_wait<0>();
    }
    __device__ __forceinline__ void advance() {
        of_rows.advance();
    }

    // Rows without a pair have undefined contents.
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

// `Gradients` of `layout/gradient_pair_quantize.cuh`.
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
        cp_async_commit();
    }
    __device__ __forceinline__ void start(const ElementPlaces& next, const ElementPlaces& after) {
        of_rows.ask(next, after);
    }
    __device__ __forceinline__ void take() {
        cp_async_wait<0>();
    }
    __device__ __forceinline__ bool next_has(uint32 in_tile) const {
        return of_rows.next_exists(in_tile);
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
