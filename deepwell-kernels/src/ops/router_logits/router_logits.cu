// The projection of a router and its backward: GEMMs of FP32 accuracy with x in BF16, on tensor
// cores, with FP32 operands split into BF16 parts, see mma/split_tile.cuh.
//   router_logits               logits [T, E] = x [T, D] w [E, D]^T (+ bias [E])
//   router_logits_dgrad    dx [T, D] = dlogits [T, E] w [E, D], rounded to BF16
//   router_logits_wgrad   dw [E, D] (+)= dlogits [T, E]^T x [T, D]
// With few experts a result has few tiles. The contraction is therefore split into runs, which
// several CTAs sum; the last CTA of a tile adds the runs' sums in order. `_few` kernels have tiles
// for at most 32 experts.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/types.cuh"
#include "mma/split_tile.cuh"

constexpr int kThreads = split_tile::kThreads;

extern __shared__ __align__(16) unsigned char dynamic[];

// Runs of a contraction (split-K).
struct Runs {
    float* partials;   // [runs, rows, columns] of the result, unused with one run
    uint32* arrivals;  // one counter per tile
    int32 length;      // length of a run, a multiple of 32
    uint32 count;
};

// The first element of a CTA's tile; tiles are numbered row by row.
struct Tile {
    int32 row;
    int32 column;
};

template <int kM, int kN>
__device__ __forceinline__ Tile tile_of(uint32 index, int32 columns) {
    const uint32 across = (columns + kN - 1) / kN;
    return Tile{static_cast<int32>(index / across) * kM, static_cast<int32>(index % across) * kN};
}

// Two neighbouring elements of a row, the first in an even column.
struct Pair {
    int64 place;  // index of the first in a matrix of the result's shape
    int32 column;
    int32 count;      // how many of the two are in the result
    bool is_aligned;  // whether both can be stored at once
};

struct Values {
    float of[2];
};

// Stores the elements of a pair that are in the result.
__device__ __forceinline__ void store(float* to, const Pair& at, const float (&values)[2]) {
    if (at.count == 2 && at.is_aligned) {
        *reinterpret_cast<float2*>(to + at.place) = make_float2(values[0], values[1]);
        return;
    }
    to[at.place] = values[0];
    if (at.count == 2) {
        to[at.place + 1] = values[1];
    }
}

__device__ __forceinline__ void store(bf16* to, const Pair& at, const float (&values)[2]) {
    if (at.count == 2 && at.is_aligned) {
        *reinterpret_cast<uint32*>(to + at.place) = to_bf16_pair(values[0], values[1]);
        return;
    }
    to[at.place] = to_bf16(values[0]);
    if (at.count == 2) {
        to[at.place + 1] = to_bf16(values[1]);
    }
}

// Calls `each(pair, values)` for the elements of a tile that are in the result.
template <int kM, int kN, typename Each>
__device__ __forceinline__ void each_pair(const split_tile::Accumulators<kM, kN>& accumulators,
                                          const Tile& tile, int32 rows, int32 columns,
                                          const Each& each) {
    using Of = split_tile::Warps<kM, kN>;
    const int32 lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < Of::kFragmentsM; ++m) {
#pragma unroll
        for (int n = 0; n < Of::kFragmentsN; ++n) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int32 row = tile.row + Of::row() + m * 16 + half * 8 + lane / 4;
                const int32 column = tile.column + Of::column() + n * 8 + lane % 4 * 2;
                if (row < rows && column < columns) {
                    const float(&found)[4] = accumulators[m][n];
                    each(Pair{static_cast<int64>(row) * columns + column, column,
                              min(columns - column, 2), columns % 2 == 0},
                         Values{{found[2 * half], found[2 * half + 1]}});
                }
            }
        }
    }
}

// As each_pair, with the sums over all of K: a CTA computes one run of one tile, and the last CTA
// of a tile calls `write`.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, typename A, typename B, typename Write>
__device__ __forceinline__ void gemm(TileOperand<A> a, TileOperand<B> b, const Runs& runs,
                                     const Write& write) {
    auto& shared =
        *reinterpret_cast<split_tile::Shared<A, B, kAKMajor, kBKMajor, kM, kN>*>(dynamic);
    const int32 rows = a.outer, columns = b.outer;
    const uint32 tiles = gridDim.x / runs.count;
    const uint32 index = blockIdx.x % tiles, run = blockIdx.x / tiles;
    const Tile tile = tile_of<kM, kN>(index, columns);
    const int32 first = run * runs.length;
    a.k = b.k = min(first + runs.length, a.k);
    split_tile::Accumulators<kM, kN> accumulators;
    split_tile::mainloop<kAKMajor, kBKMajor, kM, kN>(accumulators, a, b, tile.row, tile.column,
                                                     first, shared);
    if (runs.count == 1) {
        each_pair<kM, kN>(accumulators, tile, rows, columns, write);
        return;
    }
    const uint64 elements = static_cast<uint64>(rows) * columns;
    float* const own = runs.partials + run * elements;
    // A run with an odd number of elements makes the next run misaligned.
    const bool is_even = elements % 2 == 0;
    each_pair<kM, kN>(accumulators, tile, rows, columns, [&](Pair at, const Values& values) {
        at.is_aligned = at.is_aligned && is_even;
        store(own, at, values.of);
    });
    if (!is_last_cta(runs.arrivals + index, runs.count)) {
        return;
    }
    each_pair<kM, kN>(accumulators, tile, rows, columns, [&](const Pair& at, const Values&) {
        Values sums = {{0.0f, 0.0f}};
#pragma unroll 4
        for (uint32 other = 0; other < runs.count; ++other) {
            const float* const from = runs.partials + other * elements + at.place;
            sums.of[0] += __ldcg(from);
            sums.of[1] += at.count == 2 ? __ldcg(from + 1) : 0.0f;
        }
        write(at, sums);
    });
}

// bias [e] or null; partials, arrivals, run and runs as in `Runs`, over d. One CTA per tile of
// logits and run.
#define ROUTER_LOGITS(name, m, n)                                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        name(const bf16* __restrict__ x, const float* __restrict__ w,                            \
             const float* __restrict__ bias, float* __restrict__ logits, float* partials,        \
             uint32* arrivals, int32 t, int32 e, int32 d, int32 run, uint32 runs) {              \
        gemm<true, true, m, n>(TileOperand<bf16>{x, d, t, d}, TileOperand<float>{w, d, e, d},    \
                               Runs{partials, arrivals, run, runs},                              \
                               [&](const Pair& at, Values values) {                              \
                                   for (int32 i = 0; bias != nullptr && i < at.count; ++i) {     \
                                       values.of[i] += bias[at.column + i];                      \
                                   }                                                             \
                                   store(logits, at, values.of);                                 \
                               });                                                               \
    }

// partials, arrivals, run and runs as in `Runs`, over t. One CTA per tile of dw and run.
#define ROUTER_LOGITS_WEIGHT_GRAD(name, m, n)                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        name(const float* __restrict__ dlogits, const bf16* __restrict__ x, float* dw,           \
             float* partials, uint32* arrivals, int32 t, int32 e, int32 d, int32 run,            \
             uint32 runs, uint32 accumulate) {                                                   \
        gemm<false, false, m, n>(TileOperand<float>{dlogits, e, e, t},                           \
                                 TileOperand<bf16>{x, d, d, t},                                  \
                                 Runs{partials, arrivals, run, runs},                            \
                                 [&](const Pair& at, Values values) {                            \
                                     for (int32 i = 0; accumulate && i < at.count; ++i) {        \
                                         values.of[i] += dw[at.place + i];                       \
                                     }                                                           \
                                     store(dw, at, values.of);                                   \
                                 });                                                             \
    }

ROUTER_LOGITS(router_logits, 64, 64)
ROUTER_LOGITS(router_logits_few, 128, 32)
ROUTER_LOGITS_WEIGHT_GRAD(router_logits_wgrad, 64, 128)
ROUTER_LOGITS_WEIGHT_GRAD(router_logits_wgrad_few, 32, 128)

// dx for at most 160 experts: a CTA processes tiles of one column of dx, a grid apart, with the
// parts of the column's w in shared memory. 16,384 tokens of 2048 elements and 64 experts are 26
// GFLOP as six GEMMs of parts, 45 us at the rate of mma.sync on an H200, with 67 MB written. A CTA
// per tile would wait for both operands and split both, for only two steps along K. Dynamic shared
// memory is `WalkShared`, with a buffer of b per 32 experts.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    router_logits_dgrad_few(const float* __restrict__ dlogits, const float* __restrict__ w,
                                 bf16* __restrict__ dx, int32 t, int32 e, int32 d) {
    constexpr int kM = 64, kN = 64;
    auto& shared = *reinterpret_cast<split_tile::WalkShared<kM, kN>*>(dynamic);
    const int32 across = (d + kN - 1) / kN;
    const int32 column = static_cast<int32>(blockIdx.x) % across * kN;
    const int32 first = static_cast<int32>(blockIdx.x) / across;
    const int32 down = static_cast<int32>(gridDim.x) / across;
    split_tile::walk<kM, kN>(
        TileOperand<float>{dlogits, e, t, e}, TileOperand<float>{w, d, d, e}, first * kM,
        down * kM, column, shared,
        [&](const split_tile::Accumulators<kM, kN>& accumulators, int32 row) {
            each_pair<kM, kN>(accumulators, Tile{row, column}, t, d,
                              [&](const Pair& at, const Values& values) {
                                  store(dx, at, values.of);
                              });
        });
}

// One CTA per tile of dx.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    router_logits_dgrad(const float* __restrict__ dlogits, const float* __restrict__ w,
                             bf16* __restrict__ dx, int32 t, int32 e, int32 d) {
    gemm<true, false, 64, 64>(
        TileOperand<float>{dlogits, e, t, e}, TileOperand<float>{w, d, d, e},
        Runs{nullptr, nullptr, (e + split_tile::kBlockK - 1) / split_tile::kBlockK *
                                   split_tile::kBlockK, 1},
        [&](const Pair& at, const Values& values) { store(dx, at, values.of); });
}
