// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of NVFP4 operands: E2M1 data, a UE4M3 scale per
// 16 elements along K, both by rows, and an FP32 scale for each tensor. All three GEMMs of a linear
// layer have this form.
//
// The sums of elements times block scales are multiplied by the product of both tensor scales and
// rounded; then bias or stored results are added.
//
// Persistent: a CTA (or a CTA pair) visits tiles in an order that keeps operands in the L2 cache.
// Warps have roles, see mma/sm100_tile.cuh: one warp issues copies of data and scales, one issues
// MMAs, four store results while the next tile is multiplied. Out-of-bounds elements of the
// operands read as zeros. K is a multiple of 32, as tensor copies require, and no operand is empty.
// Sums run over K in ascending order for any grid.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/sm100_scaled_gemm.cuh"
#include "epilogue/store_tensor_tile.cuh"
#include "mma/sm100_nvfp4_tile.cuh"

using namespace sm100_nvfp4;

extern __shared__ __align__(1024) uint8 memory[];

// The scales of both tensors, [1] each.
struct TensorScales {
    const float* a;
    const float* b;
};

template <typename S, typename Element>
__device__ __forceinline__ void gemm(const Operand& a, const Operand& b,
                                     const TileResult<Element>& result, TensorScales scales,
                                     int32 k) {
    scaled_gemm<S>(a, b, k, memory,
                   [&](const Shared<S>& shared, uint32 tensor_base, auto tiles) {
                       const float factor = __fmul_rn(__ldg(scales.a), __ldg(scales.b));
                       const ScaledResult<Element> scaled{result, factor};
                       store_tensor_tiles(shared, tensor_base, tiles, scaled);
                   });
}

// a [m, k] in boxes of 128 rows, b [n, k] in boxes of tile_n / ctas rows, both of 128 bytes and
// swizzled by 128 bytes. If `down` tiles (for b) or `across` tiles (for a) of a cluster share rows,
// each box has one tile's share. Scales in boxes of a stage (mma/sm100_nvfp4_tile.cuh), of 128 rows
// of a and of tile_n rows of b; bias [n] or null, out [m, n]; `accumulate` adds to an FP32 result.
// A CTA pair is a cluster of two, unless tiles share operands.
#define NVFP4_GEMM(name, ctas, tile_n, down, across, Element)                                    \
    extern "C" __global__ void __cluster_dims__((ctas) * (down) * (across), 1, 1)                \
        __launch_bounds__(kThreads, 1)                                                           \
            name(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a_scales,\
                 const float* __restrict__ a_tensor_scale,                                       \
                 const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap b_scales,\
                 const float* __restrict__ b_tensor_scale, const Element* __restrict__ bias,     \
                 Element* __restrict__ out, int32 m, int32 n, int32 k, uint32 accumulate) {      \
        gemm<Shape<ctas, tile_n, down, across>>(                                                 \
            Operand{a, a_scales, m}, Operand{b, b_scales, n},                                    \
            TileResult<Element>{out, bias, m, n, accumulate != 0},                               \
            TensorScales{a_tensor_scale, b_tensor_scale}, k);                                    \
    }

#define GEMMS(tile, ...)                                                                         \
    NVFP4_GEMM(sm100_nvfp4_gemm_bf16_##tile, __VA_ARGS__, bf16)                                  \
    NVFP4_GEMM(sm100_nvfp4_gemm_f32_##tile, __VA_ARGS__, float)

GEMMS(128x128, 1, 128, 1, 1)
GEMMS(128x256, 1, 256, 1, 1)
GEMMS(256x128, 2, 128, 1, 1)
GEMMS(256x256, 2, 256, 1, 1)

// Two CTA pairs that share rows of a, or of b.
GEMMS(256x128_1x2, 2, 128, 1, 2)
GEMMS(256x256_2x1, 2, 256, 2, 1)
