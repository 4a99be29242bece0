// The projection of a router and its backward: GEMMs in FP32 with x in BF16, see mma/f32_tile.cuh.
//   router_logits               logits [T, E] = x [T, D] w [E, D]^T (+ bias [E])
//   router_logits_input_grad    dx [T, D] = dlogits [T, E] w [E, D], rounded to BF16
//   router_logits_weight_grad   dw [E, D] (+)= dlogits [T, E]^T x [T, D]
// A result of few experts has few tiles. Its contraction is cut into runs, which several CTAs sum;
// the last CTA of a tile adds the runs' sums in order. `_few` kernels have tiles for at most 32
// experts.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/types.cuh"
#include "mma/f32_tile.cuh"

constexpr int kThreads = f32_tile::kThreads;
constexpr int kOwn = f32_tile::kOwn;

// The runs of a contraction.
struct Runs {
    float* partials;   // [runs, rows, columns] of the result, not used with one run
    uint32* arrivals;  // a counter for each tile
    int32 length;      // of a run, a multiple of 16
    uint32 count;
};

// The first element of a CTA's tile, tiles of a row one after the other.
struct Tile {
    int32 row;
    int32 column;
};

template <int kM, int kN>
__device__ __forceinline__ Tile tile_of(uint32 index, int32 columns) {
    const uint32 across = (columns + kN - 1) / kN;
    return Tile{static_cast<int32>(index / across) * kM, static_cast<int32>(index % across) * kN};
}

// Calls `write(place, column, value)` for the elements of a tile that are inside of the result.
template <int kN, typename Write>
__device__ __forceinline__ void each_element(const f32_tile::Accumulators& accumulators,
                                             const Tile& tile, int32 rows, int32 columns,
                                             const Write& write) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            const int32 row = tile.row + f32_tile::own_row<kN>() + i;
            const int32 column = tile.column + f32_tile::own_column<kN>() + j;
            if (row < rows && column < columns) {
                write(static_cast<int64>(row) * columns + column, column, accumulators[i][j]);
            }
        }
    }
}

// As each_element with the sums over all of K: a CTA computes one run of one tile, and the last one
// of a tile writes.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, typename A, typename B, typename Write>
__device__ __forceinline__ void gemm(TileOperand<A> a, TileOperand<B> b, const Runs& runs,
                                     const Write& write) {
    __shared__ f32_tile::Shared<kM, kN> shared;
    const int32 rows = a.outer, columns = b.outer;
    const uint32 tiles = gridDim.x / runs.count;
    const uint32 index = blockIdx.x % tiles, run = blockIdx.x / tiles;
    const Tile tile = tile_of<kM, kN>(index, columns);
    const int32 first = run * runs.length;
    a.k = b.k = min(first + runs.length, a.k);
    f32_tile::Accumulators accumulators;
    f32_tile::mainloop<kAKMajor, kBKMajor>(accumulators, a, b, tile.row, tile.column, first,
                                           shared);
    if (runs.count == 1) {
        each_element<kN>(accumulators, tile, rows, columns, write);
        return;
    }
    const uint64 elements = static_cast<uint64>(rows) * columns;
    float* const own = runs.partials + run * elements;
    each_element<kN>(accumulators, tile, rows, columns,
                     [&](int64 place, int32, float value) { own[place] = value; });
    if (!is_last_cta(runs.arrivals + index, runs.count)) {
        return;
    }
    each_element<kN>(accumulators, tile, rows, columns, [&](int64 place, int32 column, float) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint32 other = 0; other < runs.count; ++other) {
            sum += __ldcg(runs.partials + other * elements + place);
        }
        write(place, column, sum);
    });
}

// bias [e] or null; partials, arrivals, run and runs as in `Runs`, over d. A CTA for each tile of
// logits and each run.
#define ROUTER_LOGITS(name, m, n)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ x, const float* __restrict__ w,                            \
             const float* __restrict__ bias, float* __restrict__ logits, float* partials,        \
             uint32* arrivals, int32 t, int32 e, int32 d, int32 run, uint32 runs) {              \
        gemm<true, true, m, n>(TileOperand<bf16>{x, d, t, d}, TileOperand<float>{w, d, e, d},    \
                               Runs{partials, arrivals, run, runs},                              \
                               [&](int64 place, int32 column, float value) {                     \
                                   logits[place] =                                               \
                                       bias == nullptr ? value : value + bias[column];           \
                               });                                                               \
    }

// partials, arrivals, run and runs as in `Runs`, over t. A CTA for each tile of dw and each run.
#define ROUTER_LOGITS_WEIGHT_GRAD(name, m, n)                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const float* __restrict__ dlogits, const bf16* __restrict__ x, float* dw,           \
             float* partials, uint32* arrivals, int32 t, int32 e, int32 d, int32 run,            \
             uint32 runs, uint32 accumulate) {                                                   \
        gemm<false, false, m, n>(TileOperand<float>{dlogits, e, e, t},                           \
                                 TileOperand<bf16>{x, d, d, t},                                  \
                                 Runs{partials, arrivals, run, runs},                            \
                                 [&](int64 place, int32, float value) {                          \
                                     dw[place] = accumulate ? dw[place] + value : value;         \
                                 });                                                             \
    }

ROUTER_LOGITS(router_logits, 64, 64)
ROUTER_LOGITS(router_logits_few, 128, 32)
ROUTER_LOGITS_WEIGHT_GRAD(router_logits_weight_grad, 64, 64)
ROUTER_LOGITS_WEIGHT_GRAD(router_logits_weight_grad_few, 32, 128)

// A CTA for each tile of dx.
extern "C" __global__ void __launch_bounds__(kThreads)
    router_logits_input_grad(const float* __restrict__ dlogits, const float* __restrict__ w,
                             bf16* __restrict__ dx, int32 t, int32 e, int32 d) {
    gemm<true, false, 64, 64>(TileOperand<float>{dlogits, e, t, e}, TileOperand<float>{w, d, d, e},
                              Runs{nullptr, nullptr, e, 1},
                              [&](int64 place, int32, float value) { dx[place] = to_bf16(value); });
}
