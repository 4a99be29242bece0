// One 128 x 128 tile of an MXFP8 GEMM, both operands K-major, by 256 threads.
//
// Tiles of 128 along K pass through a pipeline of three stages. A stage has two 16 KiB tiles of
// data, copied by cp.async two steps ahead, and the scales of their rows, which threads load during
// the MMAs of an earlier tile. Each of the eight warps computes 64 x 32 of the result.
//
// `Steps` multiplies the data of a stage in four steps of 32 along K, and defines the layout of
// scales in a stage: mma/mxfp8_factors.cuh, mma/mxfp8_block_scale.cuh.
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

// Operand: row-major data [outer, k], and scales in tiles (layout/scale_tile.cuh).
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

// Stages of operands with four scales for each row.
struct WordStages {
    static constexpr int kStages = mxfp8_tile::kStages;
    static constexpr int kStageBytes = mxfp8_tile::kStageBytes;
    using Word = uint32;
};

using Accumulators = float[kFragmentsM][kFragmentsN][4];

// Address of the scales of the calling thread's row in its first scale tile. The first half of the
// threads has rows of a, the second half rows of b; null outside the matrix.
__device__ __forceinline__ const uint8* row_scales(const Operand& a, const Operand& b, int32 row,
                                                   int32 column) {
    const int32 thread = threadIdx.x;
    const bool of_a = thread < kBlockM;
    const int32 outer = of_a ? row + thread : column + thread - kBlockM;
    const int32 extent = of_a ? a.outer : b.outer;
    const uint8* scales = of_a ? a.scales : b.scales;
    return outer < extent ? scales + scale_tile_place(outer, 0, a.k) +
                                scale_row_place(outer % kScaleTileRows)
                          : nullptr;
}

// Loads the scales of the calling thread's row.
class ScaleFetch {
    const uint8* scales_;  // of the row in its first scale tile; null outside the matrix

  public:
    __device__ __forceinline__ ScaleFetch(const Operand& a, const Operand& b, int32 row,
                                          int32 column)
        : scales_(row_scales(a, b, row, column)) {}

    // Returns the scales of the four blocks of tile `tile`; ones outside the matrix.
    __device__ __forceinline__ uint32 fetch(int32 tile) const {
        return scales_ == nullptr
                   ? kE8m0One * 0x01010101u
                   : *reinterpret_cast<const uint32*>(scales_ + tile * kScaleTileBytes);
    }
};

// Loads the scales of the calling thread's row for a GEMM over a part of K: from `first` to `first
// + count`, both multiples of a block. Tiles along K begin at `first`, which may lie anywhere in a
// scale tile.
class SegmentScaleFetch {
    const uint8* scales_;  // of the row in its first scale tile; null outside the matrix
    int32 first_block_;
    int32 blocks_;

  public:
    __device__ __forceinline__ SegmentScaleFetch(const Operand& a, const Operand& b, int32 row,
                                                 int32 column, int32 first, int32 count)
        : scales_(row_scales(a, b, row, column)),
          first_block_(first / kScaleBlock),
          blocks_(count / kScaleBlock) {}

    // Returns the scales of the four blocks of tile `tile`; ones outside the matrix and outside the
    // part of K, where data is zero but scales may belong to others.
    __device__ __forceinline__ uint32 fetch(int32 tile) const {
        constexpr uint32 kOnes = kE8m0One * 0x01010101u;
        if (scales_ == nullptr) {
            return kOnes;
        }
        const int32 left = blocks_ - tile * kSteps;
        const int32 block = first_block_ + tile * kSteps;
        const int32 skipped = block % kSteps;
        const uint8* const at = scales_ + static_cast<int64>(block / kSteps) * kScaleTileBytes;
        uint64 words = *reinterpret_cast<const uint32*>(at);
        if (left > kSteps - skipped && skipped > 0) {
            const uint64 next = *reinterpret_cast<const uint32*>(at + kScaleTileBytes);
            words |= next << 32;
        }
        const uint32 word = words >> (8 * skipped);
        const uint32 inside = left >= kSteps ? 0xffffffffu : (1u << (8 * left)) - 1;
        return (word & inside) | (kOnes & ~inside);
    }
};

template <bool kVector>
using Copy = TileCopy<uint8, true, kVector, kThreads>;

// accumulators = the sum over `tiles` tiles along K of the operands that `copy_a` and `copy_b`
// load, with the scales of `scales.fetch(tile)` for the calling thread's row. `shared` has
// Steps::kStages * Steps::kStageBytes, 16-byte aligned, and may be reused on return.
//
// `Steps` has kStages, kStageBytes and Word, the scales of a row in a stage, and for stage `number`
// from 0 to kStages - 1:
//   put_scales(stage, number, word): stores the scales of the calling thread's row;
//   meet(number): barrier of all threads, after which the stage is complete;
//   multiply(accumulators, stage): adds the stage of the last `meet`.
template <typename Steps, bool kVector, typename Scales>
__device__ __forceinline__ void mainloop_over(Accumulators& accumulators,
                                              const Copy<kVector>& copy_a,
                                              const Copy<kVector>& copy_b, const Scales& scales,
                                              int32 tiles, unsigned char* shared) {
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

    // Elements copied one by one are visible to all threads after the next barrier.
    const auto commit = [] {
        if constexpr (kVector) {
            cp_async_commit();
        }
    };
    Steps steps;
#pragma unroll
    for (int number = 0; number < Steps::kStages - 1; ++number) {
        if (number < tiles) {
            unsigned char* stage = shared + number * Steps::kStageBytes;
            copy_a.start(stage, number * kBlockK);
            copy_b.start(stage + kTileBytes, number * kBlockK);
            steps.put_scales(stage, number, scales.fetch(number));
        }
        commit();
    }

    int32 read_number = 0;
    int32 write_number = Steps::kStages - 1;
    for (int32 tile = 0; tile < tiles; ++tile) {
        // The tile has arrived for all threads, and all threads have read the stage to be
        // overwritten.
        if constexpr (kVector) {
            cp_async_wait<Steps::kStages - 2>();
        }
        steps.meet(read_number);
        const int32 next = tile + Steps::kStages - 1;
        unsigned char* write_stage = shared + write_number * Steps::kStageBytes;
        typename Steps::Word word = {};
        if (next < tiles) {
            copy_a.start(write_stage, next * kBlockK);
            copy_b.start(write_stage + kTileBytes, next * kBlockK);
            word = scales.fetch(next);
        }
        commit();

        steps.multiply(accumulators, shared + read_number * Steps::kStageBytes);

        if (next < tiles) {
            steps.put_scales(write_stage, write_number, word);
        }
        read_number = read_number + 1 == Steps::kStages ? 0 : read_number + 1;
        write_number = write_number + 1 == Steps::kStages ? 0 : write_number + 1;
    }
    // No copy is in flight: the copy groups after the last tile are empty.
    __syncthreads();
}

// accumulators = the tile of a · b that begins at (row, column), as `mainloop_over`. a.k == b.k.
template <typename Steps, bool kVector>
__device__ __forceinline__ void mainloop(Accumulators& accumulators, const Operand& a,
                                        const Operand& b, int32 row, int32 column,
                                        unsigned char* shared) {
    const Copy<kVector> copy_a(TileOperand<uint8>{a.data, a.k, a.outer, a.k}, row);
    const Copy<kVector> copy_b(TileOperand<uint8>{b.data, b.k, b.outer, b.k}, column);
    const int32 tiles = (a.k + kBlockK - 1) / kBlockK;
    mainloop_over<Steps, kVector>(accumulators, copy_a, copy_b, ScaleFetch(a, b, row, column),
                                  tiles, shared);
}

}  // namespace mxfp8_tile
