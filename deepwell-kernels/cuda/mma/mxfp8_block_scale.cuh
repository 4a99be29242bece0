// Steps of an MXFP8 GEMM (mma/mxfp8_tile.cuh) on tensor cores of sm_120a, which apply the scales of
// blocks of 32: an MMA covers one block along K and adds directly to the accumulators.
#pragma once

#include "common/types.cuh"
#include "layout/operand_tile.cuh"
#include "mma/mxfp8_tile.cuh"
#include "ptx/mma_sync.cuh"

namespace mxfp8_tile {

// In a stage the four scales of a row are one word; words of a's rows come first. A lane reads
// words once per stage; the instruction of a step selects a byte of each word.
class BlockScaleSteps : public WordStages {
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
    // Scale words of the rows and columns that this lane provides, see mma_m16n8k32_mxfp8. Of each
    // four lanes, two provide no scale of a and three no scale of b: their words are ignored.
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
