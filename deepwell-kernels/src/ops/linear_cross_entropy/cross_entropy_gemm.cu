// The three GEMMs of an output head over one chunk of tokens, in BF16 with FP32 accumulation on
// mma.sync:
//   logits       l  [T, L] = x [T, K] w [V, K]^T           FP32; zeros in the columns from V to L
//   dgrad   dx [T, K] = dl [T, V] w [V, K]            BF16
//   wgrad  dw [V, K] (+)= dl [T, V]^T x [T, K]       FP32
// dl is in the place of the logits: rows of 2 L elements, of which the first V are used, followed
// by zeros up to L. L is V rounded up to a multiple of eight, so the GEMMs of a linear layer cannot
// be used. A CTA computes one 128 x 128 tile, see mma/bf16_tile.cuh. `_scalar` kernels read single
// elements, for K that is not a multiple of eight.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/bf16_tile.cuh"
#include "scheduler/tile_order.cuh"

constexpr int kThreads = bf16_tile::kThreads;
static_assert(kStagedBytes<float> <= bf16_tile::kSharedBytes, "the result goes through the stages");

extern __shared__ __align__(128) unsigned char shared[];

// One CTA per tile of the result.
template <bool kAKMajor, bool kBKMajor, bool kVector, typename Element>
__device__ __forceinline__ void gemm(const TileOperand<bf16>& a, const TileOperand<bf16>& b,
                                     const TileResult<Element>& result) {
    const uint32 rows = (result.rows + bf16_tile::kBlockM - 1) / bf16_tile::kBlockM;
    const uint32 columns = (result.columns + bf16_tile::kBlockN - 1) / bf16_tile::kBlockN;
    const TilePlace place = grouped_tile(blockIdx.x, rows, columns);
    const int32 row = place.row * bf16_tile::kBlockM;
    const int32 column = place.column * bf16_tile::kBlockN;
    bf16_tile::Accumulators accumulators;
    bf16_tile::mainloop<kAKMajor, kBKMajor, kVector>(accumulators, a, b, row, column, shared);
    store_tile<Element, kThreads>(result, row, column, bf16_tile::warp_row(),
                                  bf16_tile::warp_column(), accumulators, shared);
}

// x [t, k], w [v, k], logits [t, l].
template <bool kVector>
__device__ __forceinline__ void logits_of(const bf16* x, const bf16* w, float* logits, int32 t,
                                          int32 v, int32 l, int32 k) {
    gemm<true, true, kVector>(TileOperand<bf16>{x, k, t, k}, TileOperand<bf16>{w, k, v, k},
                              TileResult<float>{logits, nullptr, t, l, false});
}

// dlogits [t, 2 l], w [v, k], dx [t, k].
template <bool kVector>
__device__ __forceinline__ void dgrad(const bf16* dlogits, const bf16* w, bf16* dx, int32 t,
                                           int32 v, int32 l, int32 k) {
    gemm<true, false, kVector>(TileOperand<bf16>{dlogits, 2 * static_cast<int64>(l), t, v},
                               TileOperand<bf16>{w, k, k, v},
                               TileResult<bf16>{dx, nullptr, t, k, false});
}

// dlogits [t, 2 l], x [t, k], dw [v, k].
template <bool kVector>
__device__ __forceinline__ void wgrad(const bf16* dlogits, const bf16* x, float* dw, int32 t,
                                            int32 v, int32 l, int32 k, uint32 accumulate) {
    gemm<false, false, kVector>(TileOperand<bf16>{dlogits, 2 * static_cast<int64>(l), v, t},
                                TileOperand<bf16>{x, k, k, t},
                                TileResult<float>{dw, nullptr, v, k, accumulate != 0});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_logits(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         float* __restrict__ logits, int32 t, int32 v, int32 l, int32 k) {
    logits_of<true>(x, w, logits, t, v, l, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_logits_scalar(const bf16* __restrict__ x, const bf16* __restrict__ w,
                                float* __restrict__ logits, int32 t, int32 v, int32 l, int32 k) {
    logits_of<false>(x, w, logits, t, v, l, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_dgrad(const bf16* __restrict__ dlogits, const bf16* __restrict__ w,
                             bf16* __restrict__ dx, int32 t, int32 v, int32 l, int32 k) {
    dgrad<true>(dlogits, w, dx, t, v, l, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_dgrad_scalar(const bf16* __restrict__ dlogits, const bf16* __restrict__ w,
                                    bf16* __restrict__ dx, int32 t, int32 v, int32 l, int32 k) {
    dgrad<false>(dlogits, w, dx, t, v, l, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_wgrad(const bf16* __restrict__ dlogits, const bf16* __restrict__ x,
                              float* __restrict__ dw, int32 t, int32 v, int32 l, int32 k,
                              uint32 accumulate) {
    wgrad<true>(dlogits, x, dw, t, v, l, k, accumulate);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_wgrad_scalar(const bf16* __restrict__ dlogits, const bf16* __restrict__ x,
                                     float* __restrict__ dw, int32 t, int32 v, int32 l, int32 k,
                                     uint32 accumulate) {
    wgrad<false>(dlogits, x, dw, t, v, l, k, accumulate);
}
