// The three GEMMs of a linear layer in BF16 with FP32 accumulation, on mma.sync:
//   linear       y  [T, N] = x [T, K] w [N, K]^T (+ bias [N])    BF16 result
//   dgrad   dx [T, K] = dy [T, N] w [N, K]                  BF16 result
//   wgrad  dw [N, K] (+)= dy [T, N]^T x [T, K]             FP32 result
// A CTA computes one 128 x 128 tile of the result, see mma/bf16_tile.cuh; operands that are not
// stored along the contraction are transposed by ldmatrix. Out-of-bounds elements of edge tiles
// read as zeros and are not stored. `_scalar` kernels read single elements, for rows whose length
// is not a multiple of eight elements. Sums run over K in ascending order for any grid.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/bf16_tile.cuh"
#include "scheduler/tile_order.cuh"

constexpr int kThreads = bf16_tile::kThreads;
static_assert(kStagedBytes<float> <= bf16_tile::kSharedBytes, "the result goes through the stages");

extern __shared__ __align__(128) unsigned char shared[];

// result [m, n] = a b, K = k; CTAs beyond the last tile exit.
template <bool kAKMajor, bool kBKMajor, bool kVector, typename Element>
__device__ __forceinline__ void gemm(const TileOperand<bf16>& a, const TileOperand<bf16>& b,
                                     const TileResult<Element>& result) {
    const uint32 rows = (result.rows + bf16_tile::kBlockM - 1) / bf16_tile::kBlockM;
    const uint32 columns = (result.columns + bf16_tile::kBlockN - 1) / bf16_tile::kBlockN;
    if (blockIdx.x >= rows * columns) {
        return;
    }
    const TilePlace place = grouped_tile(blockIdx.x, rows, columns);
    const int32 row = place.row * bf16_tile::kBlockM;
    const int32 column = place.column * bf16_tile::kBlockN;
    bf16_tile::Accumulators accumulators;
    bf16_tile::mainloop<kAKMajor, kBKMajor, kVector>(accumulators, a, b, row, column, shared);
    store_tile<Element, kThreads>(result, row, column, bf16_tile::warp_row(),
                                  bf16_tile::warp_column(), accumulators, shared);
}

// x [t, k], w [n, k], bias [n] or null, y [t, n].
template <bool kVector>
__device__ __forceinline__ void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* y,
                                       int32 t, int32 n, int32 k) {
    gemm<true, true, kVector>(TileOperand<bf16>{x, k, t, k}, TileOperand<bf16>{w, k, n, k},
                              TileResult<bf16>{y, bias, t, n, false});
}

// dy [t, n], w [n, k], dx [t, k].
template <bool kVector>
__device__ __forceinline__ void dgrad(const bf16* dy, const bf16* w, bf16* dx, int32 t,
                                           int32 n, int32 k) {
    gemm<true, false, kVector>(TileOperand<bf16>{dy, n, t, n}, TileOperand<bf16>{w, k, k, n},
                               TileResult<bf16>{dx, nullptr, t, k, false});
}

// dy [t, n], x [t, k], dw [n, k].
template <bool kVector>
__device__ __forceinline__ void wgrad(const bf16* dy, const bf16* x, float* dw, int32 t,
                                            int32 n, int32 k, uint32 accumulate) {
    gemm<false, false, kVector>(TileOperand<bf16>{dy, n, n, t}, TileOperand<bf16>{x, k, k, t},
                                TileResult<float>{dw, nullptr, n, k, accumulate != 0});
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    bf16_gemm_linear(const bf16* __restrict__ x, const bf16* __restrict__ w,
                     const bf16* __restrict__ bias, bf16* __restrict__ y, int32 t, int32 n,
                     int32 k) {
    linear<true>(x, w, bias, y, t, n, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    bf16_gemm_linear_scalar(const bf16* __restrict__ x, const bf16* __restrict__ w,
                            const bf16* __restrict__ bias, bf16* __restrict__ y, int32 t, int32 n,
                            int32 k) {
    linear<false>(x, w, bias, y, t, n, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    bf16_gemm_dgrad(const bf16* __restrict__ dy, const bf16* __restrict__ w,
                         bf16* __restrict__ dx, int32 t, int32 n, int32 k) {
    dgrad<true>(dy, w, dx, t, n, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    bf16_gemm_dgrad_scalar(const bf16* __restrict__ dy, const bf16* __restrict__ w,
                                bf16* __restrict__ dx, int32 t, int32 n, int32 k) {
    dgrad<false>(dy, w, dx, t, n, k);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    bf16_gemm_wgrad(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                          float* __restrict__ dw, int32 t, int32 n, int32 k, uint32 accumulate) {
    wgrad<true>(dy, x, dw, t, n, k, accumulate);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    bf16_gemm_wgrad_scalar(const bf16* __restrict__ dy, const bf16* __restrict__ x,
                                 float* __restrict__ dw, int32 t, int32 n, int32 k,
                                 uint32 accumulate) {
    wgrad<false>(dy, x, dw, t, n, k, accumulate);
}
