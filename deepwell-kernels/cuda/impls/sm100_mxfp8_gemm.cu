// out [M, N] (+)= a [M, K] b [N, K]^T (+ bias [N]) of MXFP8 operands: E4M3 codes and one E8M0 scale
// for each 32 of them along K, both by rows. All three products of a linear layer have this form.
//
// Persistent: a block (or a pair of blocks) walks tiles in an order that keeps operands in the L2
// cache. Its warps have roles, see mma/sm100_mxfp8_tile.cuh: one has codes copied, one multiplies,
// two bring scales, four write results while the next tile is multiplied, where tensor memory holds
// two accumulators. What lies outside of the operands reads as zero codes with scales of one. The
// scales are read by rows: nobody has to tile them before. K is a multiple of 16, as tensor copies
// need, and nothing is empty. Sums run over K in ascending order whatever the grid.
//
// architectures: sm_100a sm_103a
#include "common/types.cuh"
#include "epilogue/store_tensor_tile.cuh"
#include "mma/sm100_mxfp8_tile.cuh"
#include "ptx/elect.cuh"
#include "scheduler/tile_order.cuh"

using namespace sm100_mxfp8;

constexpr int kThreads = 256;
constexpr int kCodesWarp = 0;
constexpr int kMultiplyWarp = 1;
constexpr int kScalesWarpA = 2;
constexpr int kScalesWarpB = 3;
constexpr int kFirstEpilogueWarp = 4;
static_assert(kThreads == 32 * (kFirstEpilogueWarp + kEpilogueWarps), "a role for each warp");
static_assert(kFirstEpilogueWarp % 4 == 0, "a warp reads the lanes of its number modulo four");

extern __shared__ __align__(1024) uint8 memory[];

template <int kBlocks>
__device__ __forceinline__ void synchronize_all() {
    if constexpr (kBlocks == 1) {
        __syncthreads();
    } else {
        cluster_arrive();
        cluster_wait();
    }
}

template <typename S, typename Element>
__device__ __forceinline__ void gemm(const TensorMap& a, const Scales& a_scales,
                                     const TensorMap& b, const Scales& b_scales,
                                     const TileResult<Element>& result, int32 depth) {
    const Shared<S> shared(memory);
    const uint32 warp = threadIdx.x / 32;
    const uint32 rank = S::kBlocks == 1 ? 0 : cluster_rank();
    if (warp == kCodesWarp && elect_one()) {
        shared.init_barriers();
    }
    if (warp == kMultiplyWarp) {
        tcgen05_allocate_all<S::kBlocks>(shared.tensor_base);
    }
    tcgen05_fence_before_barrier();
    synchronize_all<S::kBlocks>();
    tcgen05_fence_after_barrier();
    const uint32 tensor_base = *shared.tensor_base;

    const int32 pieces = (depth + kBlockK - 1) / kBlockK;
    const uint32 tile_rows = (result.rows + S::kTileM - 1) / S::kTileM;
    const uint32 tile_columns = (result.columns + S::kTileN - 1) / S::kTileN;
    const uint32 tiles = tile_rows * tile_columns;
    const uint32 first = blockIdx.x / S::kBlocks;
    const uint32 stride = gridDim.x / S::kBlocks;
    // The first element of a tile.
    const auto place_of = [=](uint32 tile) {
        const TilePlace place = grouped_tile<16 / S::kBlocks>(tile, tile_rows, tile_columns);
        return TilePlace{place.row * S::kTileM, place.column * S::kTileN};
    };

    if (warp == kCodesWarp) {
        if (elect_one()) {
            fetch_codes<S>(shared, a, b, pieces, first, stride, tiles, place_of);
        }
    } else if (warp == kMultiplyWarp) {
        if (rank == 0 && elect_one()) {
            multiply<S>(shared, tensor_base, pieces, first, stride, tiles);
        }
    } else if (warp == kScalesWarpA) {
        fetch_scales<S, 0, 1>(shared, a_scales, pieces, first, stride, tiles, [=](uint32 tile) {
            return static_cast<int32>(place_of(tile).row + rank * kBlockM);
        });
    } else if (warp == kScalesWarpB) {
        fetch_scales<S, 1, S::kScaleTiles - 1>(
            shared, b_scales, pieces, first, stride, tiles,
            [=](uint32 tile) { return static_cast<int32>(place_of(tile).column); });
    } else {
        const uint32 quarter = warp - kFirstEpilogueWarp;
        const uint32 lanes = quarter * 32 << 16;
        uint8* staged = shared.staged + quarter * (32 * 128);
        Ring<S::kAccumulators> ring;
        for (uint32 tile = first; tile < tiles; tile += stride) {
            const TilePlace place = place_of(tile);
            wait<S>(shared.done + ring.index, ring.phase);
            tcgen05_fence_after_barrier();
            store_tensor_tile<S::kTileN>(
                result, place.row + rank * kBlockM + quarter * 32, place.column,
                tensor_base + lanes + ring.index * S::kTileN, staged, [&] {
                    tcgen05_fence_before_barrier();
                    __syncwarp();
                    if (threadIdx.x % 32 == 0) {
                        arrive_at_first<S>(shared.drained + ring.index);
                    }
                });
            ring.advance();
        }
    }

    __syncwarp();
    tcgen05_fence_before_barrier();
    synchronize_all<S::kBlocks>();
    if (warp == kMultiplyWarp) {
        tcgen05_fence_after_barrier();
        tcgen05_free_all<S::kBlocks>(tensor_base);
    }
}

// a [m, k] in boxes of 128 rows, b [n, k] in boxes of tile_n / blocks rows, both of 128 columns and
// swizzled by 128 bytes; a_scales [m, ceil(k / 32)], b_scales [n, ceil(k / 32)], bias [n] or null,
// out [m, n]; `accumulate` adds to what is in an FP32 result. A pair is a cluster of two.
#define MXFP8_GEMM(name, blocks, tile_n, Element)                                                \
    extern "C" __global__ void __cluster_dims__(blocks, 1, 1) __launch_bounds__(kThreads, 1)     \
        name(const __grid_constant__ TensorMap a, const uint8* __restrict__ a_scales,            \
             const __grid_constant__ TensorMap b, const uint8* __restrict__ b_scales,            \
             const Element* __restrict__ bias, Element* __restrict__ out, int32 m, int32 n,      \
             int32 k, uint32 accumulate) {                                                       \
        const int32 scales = (k + kScaleBlock - 1) / kScaleBlock;                                \
        gemm<Shape<blocks, tile_n>>(a, Scales{a_scales, m, scales}, b,                           \
                                    Scales{b_scales, n, scales},                                 \
                                    TileResult<Element>{out, bias, m, n, accumulate != 0}, k);   \
    }

MXFP8_GEMM(sm100_mxfp8_gemm_128x128_bf16, 1, 128, bf16)
MXFP8_GEMM(sm100_mxfp8_gemm_128x128_f32, 1, 128, float)
MXFP8_GEMM(sm100_mxfp8_gemm_128x256_bf16, 1, 256, bf16)
MXFP8_GEMM(sm100_mxfp8_gemm_128x256_f32, 1, 256, float)
MXFP8_GEMM(sm100_mxfp8_gemm_256x128_bf16, 2, 128, bf16)
MXFP8_GEMM(sm100_mxfp8_gemm_256x128_f32, 2, 128, float)
MXFP8_GEMM(sm100_mxfp8_gemm_256x256_bf16, 2, 256, bf16)
MXFP8_GEMM(sm100_mxfp8_gemm_256x256_f32, 2, 256, float)
