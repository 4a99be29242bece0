// The three GEMMs of a linear layer in BF16 with FP32 accumulation, on tcgen05:
//   linear       y  [T, N] = x [T, K] w [N, K]^T (+ bias [N])    BF16 result
//   dgrad   dx [T, K] = dy [T, N] w [N, K]                  BF16 result
//   wgrad  dw [N, K] (+)= dy [T, N]^T x [T, K]             FP32 result
//
// Persistent: a CTA (or a CTA pair) visits tiles in an order that keeps operands in the L2 cache.
// Warps have roles, see mma/sm100_tile.cuh: one warp issues copies, one issues MMAs, four store
// results while the next tile is multiplied, because tensor memory holds two accumulators of any
// tile shape here. Operands are read in their stored layout, K-major or MN-major
// (mma/sm100_bf16_tile.cuh). Out-of-bounds elements read as zeros. Rows of operands are multiples
// of eight elements, as tensor copies require, and no operand is empty. Sums run over K in
// ascending order for any grid.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/sm100_bf16_gemm.cuh"
#include "epilogue/store_tensor_tile.cuh"

using namespace sm100_bf16;

extern __shared__ __align__(1024) uint8 memory[];

// result = a b, with `k` elements along K.
template <typename S, typename Element>
__device__ __forceinline__ void gemm(const TensorMap& a, const TensorMap& b,
                                     const TileResult<Element>& result, int32 k) {
    bf16_gemm<S>(a, b, result.rows, result.columns, k, memory,
                    [&](const Shared<S>& shared, uint32 tensor_base, auto tiles) {
                        store_tensor_tiles(shared, tensor_base, tiles, result);
                    });
}

// a [m, k] and b [n, k] in boxes of 64 elements along the stored dimension, swizzled by 128 bytes.
// K-major boxes have a CTA's rows of a tile (128 of a, tile_n / ctas of b), MN-major boxes 64
// elements along K. If `down` tiles (for b) or `across` tiles (for a) of a cluster share rows, each
// K-major box has one tile's share. bias [n] or null, out [m, n]; `accumulate` adds to an FP32
// result. A CTA pair is a cluster of two, unless tiles share operands.
#define BF16_GEMM(name, ctas, tile_n, down, across, a_k_major, b_k_major, Element)               \
    extern "C" __global__ void __cluster_dims__((ctas) * (down) * (across), 1, 1)                \
        __launch_bounds__(kThreads, 1)                                                           \
            name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,       \
                 const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,  \
                 int32 k, uint32 accumulate) {                                                   \
        gemm<Shape<ctas, tile_n, down, across, a_k_major, b_k_major>>(                           \
            a, b, TileResult<Element>{out, bias, m, n, accumulate != 0}, k);                     \
    }

#define LINEAR_GEMMS(tile, ...)                                                                  \
    BF16_GEMM(sm100_bf16_gemm_linear_##tile, __VA_ARGS__, true, true, bf16)                      \
    BF16_GEMM(sm100_bf16_gemm_dgrad_##tile, __VA_ARGS__, true, false, bf16)                 \
    BF16_GEMM(sm100_bf16_gemm_wgrad_##tile, __VA_ARGS__, false, false, float)

LINEAR_GEMMS(128x128, 1, 128, 1, 1)
LINEAR_GEMMS(128x256, 1, 256, 1, 1)
LINEAR_GEMMS(256x128, 2, 128, 1, 1)
LINEAR_GEMMS(256x256, 2, 256, 1, 1)

// Two CTA pairs that share rows of a, or of b.
LINEAR_GEMMS(256x128_1x2, 2, 128, 1, 2)
LINEAR_GEMMS(256x256_2x1, 2, 256, 2, 1)
