// The GEMMs of a linear layer of BF16 operands:
//   linear:      out [M, N] = a [M, K] b [N, K]^T (+ bias [N]), in BF16 or, (+)=, in FP32
//   dgrad:  out [M, N] = a [M, K] b [K, N], in BF16 or FP32
//   wgrad: out [M, N] (+)= a [K, M]^T b [K, N], in FP32
//
// An FP32 result may be split along K, out [parts, M, N], each part the sum over an equal number of
// stages of K, so that a result of few tiles occupies all SMs. sum_parts.cu sums the parts.
//
// Operands may be elements times block scales of tensors with a scale each: the sums are multiplied
// by the product of both tensor scales.
//
// Static persistent: a CTA computes tile after tile in an order that keeps operands in the L2
// cache. Warp specialized, see mma/sm90_bf16_tile.cuh. Out-of-bounds elements of the operands read
// as zeros. Row strides of operands are multiples of 16 bytes, as tensor copies require, and no
// operand is empty. Sums run over K in ascending order for any grid.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_store_tile.cuh"
#include "mma/sm90_bf16_tile.cuh"
#include "scheduler/persistent_tiles.cuh"

using namespace sm90_bf16;

extern __shared__ __align__(1024) uint8 memory[];

// Split-K parts of a contraction.
struct Parts {
    int32 count;
    int32 stages;  // stages per part; the last part may have fewer
};

// The tiles of the result, or of each split-K part.
template <typename S>
class Tiles {
    PersistentTiles<S::kTileM, S::kTileN, 1, S::kDown> places_;
    int32 rows_;
    int32 stages_;
    int32 part_stages_;

  public:
    __device__ __forceinline__ Tiles(int32 rows, int32 columns, int32 k, Parts parts)
        : places_(rows, columns, parts.count),
          rows_(rows),
          stages_((k + kStageK - 1) / kStageK),
          part_stages_(parts.stages) {}

    __device__ __forceinline__ bool next(TileWork& work) {
        TilePlace place;
        if (!places_.next(place)) {
            return false;
        }
        work.place = place;
        const int32 first = places_.part() * part_stages_;
        work.end = rows_;
        work.group = places_.part();
        work.b_row = place.column;
        work.first_k = first * kStageK;
        work.stages = min(stages_ - first, part_stages_);
        work.last_steps = kSteps;
        work.waves = S::kWaves;
        return true;
    }
};

// The scales of both tensors, [1] each; null for operands without.
struct TensorScales {
    const float* a;
    const float* b;

    __device__ __forceinline__ float product() const {
        return a == nullptr ? 1.0f : *a * *b;
    }
};

template <typename S, typename Element>
__device__ __forceinline__ void gemm(const TensorMap& a, const TensorMap& b,
                                     const TileResult<Element>& result, int32 k, Parts parts,
                                     TensorScales scales) {
    const Tiles<S> tiles(result.rows, result.columns, k, parts);
    multiply<S>(memory, a, b, tiles,
                [&](const TileWork& work, uint32 row, const float(&sums)[S::kTileN / 2],
                    uint8* staged) ALWAYS_INLINE {
                    TileResult<Element> part = result;
                    part.data += static_cast<int64>(work.group) * result.rows * result.columns;
                    store_wgmma_rows(part, work.place.row + row, work.place.column, sums, staged,
                                     scales.product());
                });
}

// K-major operands in boxes of 128 rows and 64 along K, MN-major operands in boxes of 64 by 64,
// both swizzled by 128 bytes; bias [n] or null, out [parts, m, n]; `accumulate` adds to an FP32
// result. With several parts there is no bias and no accumulation.
#define BF16_GEMM(name, layout, waves, columns, down, Element)                                   \
    extern "C" __global__ void __cluster_dims__(down, 1, 1) __launch_bounds__(kThreads, 1)       \
        name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,           \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate, int32 parts, int32 part_stages,                         \
             const float* __restrict__ a_scale, const float* __restrict__ b_scale) {             \
        gemm<TileShape<layout, waves, columns, down>>(                                           \
            a, b, TileResult<Element>{out, bias, m, n, accumulate != 0}, k,                      \
            Parts{parts, part_stages}, TensorScales{a_scale, b_scale});                          \
    }

#define GEMMS(tile, waves, columns, down)                                                        \
    BF16_GEMM(sm90_bf16_gemm_linear_##tile, Layout::kRows, waves, columns, down, bf16)           \
    BF16_GEMM(sm90_bf16_gemm_linear_f32_##tile, Layout::kRows, waves, columns, down, float)      \
    BF16_GEMM(sm90_bf16_gemm_dgrad_##tile, Layout::kMixed, waves, columns, down, bf16)      \
    BF16_GEMM(sm90_bf16_gemm_dgrad_f32_##tile, Layout::kMixed, waves, columns, down, float) \
    BF16_GEMM(sm90_bf16_gemm_wgrad_##tile, Layout::kColumns, waves, columns, down, float)

GEMMS(128x128, 1, 128, 1)
GEMMS(256x128, 2, 128, 1)
GEMMS(128x256, 1, 256, 1)

// A cluster of two CTAs, stacked along M, that share columns of b.
GEMMS(128x256_2x1, 1, 256, 2)
