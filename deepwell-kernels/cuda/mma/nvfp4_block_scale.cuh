// Steps of an NVFP4 GEMM on tensor cores of sm_120a, in the frame of mma/mxfp8_tile.cuh: a byte has
// two elements, so a stage has 256 along K. An MMA covers 64 of them, with four scales per row.
#pragma once

#include "common/types.cuh"
#include "layout/operand_tile.cuh"
#include "layout/scale_tile.cuh"
#include "mma/mxfp8_tile.cuh"
#include "ptx/mma_sync.cuh"

namespace nvfp4_tile {

using namespace mxfp8_tile;

constexpr int kScaleTileK = 64;  // elements of a row that a scale tile covers
constexpr int kRows = kBlockM + kBlockN;

// Operand: row-major data [outer, row_bytes], two elements to a byte, and scales in tiles.
struct Fp4Operand {
    const uint8* data;
    const uint8* scales;
    int32 outer;
    int32 k;  // elements

    __device__ __forceinline__ int32 row_bytes() const { return (k + 1) / 2; }
    __device__ __forceinline__ int32 scale_tiles() const {
        return (k + kScaleTileK - 1) / kScaleTileK;
    }
};

// A part of K. Inside a row it begins and ends at multiples of 64.
struct Fp4Range {
    int32 first;
    int32 count;
};

// Loads the scales of the calling thread's row in a part of K. The first half of the threads has
// rows of a, the second half rows of b.
class Fp4ScaleFetch {
    const uint8* scales_ = nullptr;  // of the row in its first scale tile; null outside the matrix
    int32 tiles_;                    // of the part

  public:
    __device__ __forceinline__ Fp4ScaleFetch(const Fp4Operand& a, const Fp4Operand& b, int32 row,
                                             int32 column, Fp4Range range)
        : tiles_((range.count + kScaleTileK - 1) / kScaleTileK) {
        const int32 thread = threadIdx.x;
        const bool of_a = thread < kBlockM;
        const Fp4Operand& own = of_a ? a : b;
        const int32 outer = of_a ? row + thread : column + thread - kBlockM;
        if (outer < own.outer) {
            const int64 tile = static_cast<int64>(outer / kScaleTileRows) * own.scale_tiles() +
                               range.first / kScaleTileK;
            scales_ = own.scales + tile * kScaleTileBytes + scale_row_place(outer % kScaleTileRows);
        }
    }

    // Returns the scales of the four steps of stage `stage`; zeros outside the matrix and outside
    // the part of K, where scales may belong to others.
    __device__ __forceinline__ uint4 fetch(int32 stage) const {
        uint32 words[kSteps];
#pragma unroll
        for (int32 step = 0; step < kSteps; ++step) {
            const int32 tile = stage * kSteps + step;
            words[step] = scales_ != nullptr && tile < tiles_
                              ? *reinterpret_cast<const uint32*>(
                                    scales_ + static_cast<int64>(tile) * kScaleTileBytes)
                              : 0;
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// In a stage the scales are ordered by step; words of a's rows come first. Three stages would
// exceed the shared memory of sm_120.
class NvFp4Steps {
  public:
    static constexpr int kStages = 2;
    static constexpr int kStageBytes = 2 * kTileBytes + kSteps * kRows * 4;
    using Word = uint4;
    static_assert(kStages * kStageBytes <= 99 * 1024, "what a CTA may have on sm_120");

    __device__ __forceinline__ void put_scales(unsigned char* stage, int32,
                                               const uint4& word) const {
        auto* words = reinterpret_cast<uint32*>(stage + 2 * kTileBytes) + threadIdx.x;
        words[0] = word.x;
        words[kRows] = word.y;
        words[2 * kRows] = word.z;
        words[3 * kRows] = word.w;
    }

    __device__ __forceinline__ void meet(int32) const {
        __syncthreads();
    }

    __device__ __forceinline__ void multiply(Accumulators& accumulators,
                                             const unsigned char* stage) const {
        // Not unrolled: the fragments of all steps would exceed the registers.
#pragma unroll 1
        for (int32 step = 0; step < kSteps; ++step) {
            multiply_step(accumulators, stage, step);
        }
    }

  private:
    // Of each four lanes, two provide no scales of a and three none of b: their words are ignored.
    static __device__ __forceinline__ void multiply_step(Accumulators& accumulators,
                                                         const unsigned char* stage, int32 step) {
        const auto* words =
            reinterpret_cast<const uint32*>(stage + 2 * kTileBytes) + step * kRows;
        const int32 lane = threadIdx.x % 32;
        uint32 b[kFragmentsN / 2][4];
        uint32 columns[kFragmentsN];
#pragma unroll
        for (int n = 0; n < kFragmentsN / 2; ++n) {
            tile_fragment<Side::kRight, true>(b[n], stage + kTileBytes, warp_column() + n * 16,
                                              step);
        }
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
            columns[n] = words[kBlockM + warp_column() + n * 8 + lane / 4];
        }
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            uint32 a[4];
            tile_fragment<Side::kLeft, true>(a, stage, warp_row() + m * 16, step);
            const uint32 rows = words[warp_row() + m * 16 + lane % 2 * 8 + lane / 4];
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n) {
                float(&sum)[4] = accumulators[m][n];
                mma_m16n8k64_nvfp4(sum, a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], sum, rows,
                                   columns[n]);
            }
        }
    }
};

// accumulators = the tile of a b^T over a part of K that begins at (row, column). `kVector`: rows
// are multiples of 16 bytes.
template <bool kVector>
__device__ __forceinline__ void multiply_tile(Accumulators& accumulators, const Fp4Operand& a,
                                              const Fp4Operand& b, int32 row, int32 column,
                                              Fp4Range range, unsigned char* shared) {
    const int32 row_bytes = a.row_bytes();
    const int32 first = range.first / 2, bytes = (range.count + 1) / 2;
    const Copy<kVector> copy_a(TileOperand<uint8>{a.data + first, row_bytes, a.outer, bytes}, row);
    const Copy<kVector> copy_b(TileOperand<uint8>{b.data + first, row_bytes, b.outer, bytes},
                               column);
    mainloop_over<NvFp4Steps, kVector>(accumulators, copy_a, copy_b,
                                       Fp4ScaleFetch(a, b, row, column, range),
                                       (bytes + kBlockK - 1) / kBlockK, shared);
}

__device__ __forceinline__ void multiply_by(Accumulators& accumulators, float factor) {
#pragma unroll
    for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                accumulators[m][n][i] = __fmul_rn(accumulators[m][n][i], factor);
            }
        }
    }
}

}  // namespace nvfp4_tile
