// Steps of an MXFP8 GEMM (mma/mxfp8_tile.cuh) on tensor cores of sm_120a, which apply the scales of
// blocks of 32: one MMA along K is one block, and is added to the accumulators at once.
#pragma once

#include "common/types.cuh"
#include "layout/operand_tile.cuh"
#include "mma/mxfp8_tile.cuh"
#include "ptx/mma_sync.cuh"

namespace mxfp8_tile {

// In a stage the four scales of a row are one word, those of a's rows first. A lane reads words
// once for the whole stage; which byte of them counts is part of each step's instruction.
class BlockScaleSteps {
  public:
    __device__ __forceinline__ void put_scales(unsigned char* stage, int32, uint32 word) const {
        reinterpret_cast<uint32*>(stage + 2 * kTileBytes)[threadIdx.x] = word;
    }

    __device__ __forceinline__ void meet(int32) const {
        __syncthreads();
    }

    __device__ __forceinline__ void multiply(Accumulators& accumulators,
                                             const unsigned char* stage) const {
        static_assert(kSteps == 4, "a word has a scale for each step");
        const Scales scales(stage);
        step<0>(accumulators, stage, scales);
        step<1>(accumulators, stage, scales);
        step<2>(accumulators, stage, scales);
        step<3>(accumulators, stage, scales);
    }

  private:
    // The words of the rows and columns whose scales this lane gives, see mma_m16n8k32_mxfp8. Two
    // lanes of four give none of a's rows, and three none of b's: what they read is not used.
    struct Scales {
        uint32 rows[kFragmentsM];
        uint32 columns[kFragmentsN];

        __device__ __forceinline__ explicit Scales(const unsigned char* stage) {
            const auto* words = reinterpret_cast<const uint32*>(stage + 2 * kTileBytes);
            const int32 lane = threadIdx.x % 32;
#pragma unroll
            for (int m = 0; m < kFragmentsM; ++m) {
                rows[m] = words[warp_row() + m * 16 + lane % 2 * 8 + lane / 4];
            }
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n) {
                columns[n] = words[kBlockM + warp_column() + n * 8 + lane / 4];
            }
        }
    };

    template <int kStep>
    static __device__ __forceinline__ void step(Accumulators& accumulators,
                                                const unsigned char* stage,
                                                const Scales& scales) {
        uint32 b[kFragmentsN / 2][4];
#pragma unroll
        for (int n = 0; n < kFragmentsN / 2; ++n) {
            tile_fragment<Side::kRight, true>(b[n], stage + kTileBytes, warp_column() + n * 16,
                                              kStep);
        }
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            uint32 a[4];
            tile_fragment<Side::kLeft, true>(a, stage, warp_row() + m * 16, kStep);
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n) {
                float(&sum)[4] = accumulators[m][n];
                mma_m16n8k32_mxfp8<kStep>(sum, a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], sum,
                                          scales.rows[m], scales.columns[n]);
            }
        }
    }
};

}  // namespace mxfp8_tile
