// One 128 x 128 tile of an MXFP8 GEMM, both operands K-major, by 256 threads.
//
// Tiles of 128 along K pass through a pipeline of three stages, each with two 16 KiB tiles of data,
// copied by cp.async two steps ahead, and the scales of their rows, which threads fetch while a
// tile before is multiplied. Each of the eight warps holds 64 x 32 of the result.
//
// `Steps` multiplies what is in a stage, in four steps of 32 along K, and says how scales lie
// there: mma/mxfp8_factors.cuh, mma/mxfp8_block_scale.cuh.
#pragma once

#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/operand_tile.cuh"
#include "layout/scale_tile.cuh"
#include "ptx/cp_async.cuh"

namespace mxfp8_tile {

constexpr int kBlockM = 128;
constexpr int kBlockN = 128;
constexpr int kBlockK = 128;
constexpr int kScaleBlock = 32;
constexpr int kStages = 3;
constexpr int kThreads = 256;
constexpr int kWarpM = 64;
constexpr int kWarpN = 32;
constexpr int kFragmentsM = kWarpM / 16;
constexpr int kFragmentsN = kWarpN / 8;
constexpr int kSteps = kBlockK / kScaleBlock;
constexpr int kScaleBytes = (kBlockM + kBlockN) * kSteps;
constexpr int kStageBytes = 2 * kTileBytes + kScaleBytes;
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kBlockM == kTileOuter && kBlockN == kTileOuter, "one tile of each operand");
static_assert(kThreads == kBlockM + kBlockN, "a thread fetches the scales of one row");
static_assert(kSharedBytes <= 99 * 1024, "what a CTA may have on sm_120");

// An operand: data [outer, k] by rows, and its scales in tiles (layout/scale_tile.cuh).
struct Operand {
    const uint8* data;
    const uint8* scales;
    int32 outer;
    int32 k;
};

__device__ __forceinline__ int32 warp_row() {
    return threadIdx.x / 32 % 2 * kWarpM;
}

__device__ __forceinline__ int32 warp_column() {
    return threadIdx.x / 64 * kWarpN;
}

using Accumulators = float[kFragmentsM][kFragmentsN][4];

// The scales of the calling thread's row: rows of a in the first half of the threads, of b in the
// second.
class ScaleFetch {
    const uint8* scales_;  // of the row in its first tile of scales; null outside of the matrix

  public:
    __device__ __forceinline__ ScaleFetch(const Operand& a, const Operand& b, int32 row,
                                          int32 column) {
        const int32 thread = threadIdx.x;
        const bool of_a = thread < kBlockM;
        const int32 outer = of_a ? row + thread : column + thread - kBlockM;
        const int32 extent = of_a ? a.outer : b.outer;
        const uint8* scales = of_a ? a.scales : b.scales;
        scales_ = outer < extent ? scales + scale_tile_place(outer, 0, a.k) +
                                       scale_row_place(outer % kScaleTileRows)
                                 : nullptr;
    }

    // The scales of the four blocks of tile `tile`; ones outside of the matrix.
    __device__ __forceinline__ uint32 fetch(int32 tile) const {
        return scales_ == nullptr
                   ? kE8m0One * 0x01010101u
                   : *reinterpret_cast<const uint32*>(scales_ + tile * kScaleTileBytes);
    }
};

// accumulators = the tile of a · b that begins at (row, column). `shared` has kSharedBytes, 16-byte
// aligned, and is free again when this returns. a.k == b.k.
//
// `Steps` has, for the stage of a number from 0 to kStages - 1:
//   put_scales(stage, number, word): keeps the four scales of the calling thread's row;
//   meet(number): waits for all threads, after which the stage is there;
//   multiply(accumulators, stage): adds the stage that was met last.
template <typename Steps, bool kVector>
__device__ __forceinline__ void mainloop(Accumulators& accumulators, const Operand& a,
                                        const Operand& b, int32 row, int32 column,
                                        unsigned char* shared) {
    using Copy = TileCopy<uint8, true, kVector, kThreads>;
    const Copy copy_a(TileOperand<uint8>{a.data, a.k, a.outer, a.k}, row);
    const Copy copy_b(TileOperand<uint8>{b.data, b.k, b.outer, b.k}, column);
    const ScaleFetch scales(a, b, row, column);
#pragma unroll
    for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                accumulators[m][n][i] = 0.0f;
            }
        }
    }

    // Elements that are copied one by one are there for all threads at the next barrier.
    const auto commit = [] {
        if constexpr (kVector) {
            cp_async_commit();
        }
    };
    Steps steps;
    const int32 tiles = (a.k + kBlockK - 1) / kBlockK;
#pragma unroll
    for (int number = 0; number < kStages - 1; ++number) {
        if (number < tiles) {
            unsigned char* stage = shared + number * kStageBytes;
            copy_a.start(stage, number * kBlockK);
            copy_b.start(stage + kTileBytes, number * kBlockK);
            steps.put_scales(stage, number, scales.fetch(number));
        }
        commit();
    }

    int32 read_number = 0;
    int32 write_number = kStages - 1;
    for (int32 tile = 0; tile < tiles; ++tile) {
        // The tile is there for all threads, and all are done with the stage to be written.
        if constexpr (kVector) {
            cp_async_wait<kStages - 2>();
        }
        steps.meet(read_number);
        const int32 next = tile + kStages - 1;
        unsigned char* write_stage = shared + write_number * kStageBytes;
        uint32 word = 0;
        if (next < tiles) {
            copy_a.start(write_stage, next * kBlockK);
            copy_b.start(write_stage + kTileBytes, next * kBlockK);
            word = scales.fetch(next);
        }
        commit();

        steps.multiply(accumulators, shared + read_number * kStageBytes);

        if (next < tiles) {
            steps.put_scales(write_stage, write_number, word);
        }
        read_number = read_number + 1 == kStages ? 0 : read_number + 1;
        write_number = write_number + 1 == kStages ? 0 : write_number + 1;
    }
    // No copy is under way: the groups behind the last tile's are empty.
    __syncthreads();
}

}  // namespace mxfp8_tile
