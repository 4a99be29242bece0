// One 128 x 128 tile of a BF16 GEMM, accumulated in FP32 by 128 threads.
//
// Tiles of 64 along K pass through a pipeline of three stages in shared memory, 32 KiB each, filled
// two steps ahead: by cp.async, or by stores if elements are read one by one. Each of the four
// warps computes a quarter of the result, 64 x 64: per step of 16 along K it reads 2 x 4 fragments
// for 32 mma.sync, so that shared memory bandwidth does not limit the tensor cores. The fragments
// of the next step are prefetched during the MMAs of the current step. With 96 KiB per CTA two CTAs
// fit on an SM of Hopper: the first and last steps of a CTA overlap with the MMAs of its neighbor.
#pragma once

#include "common/types.cuh"
#include "layout/operand_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"

namespace bf16_tile {

constexpr int kBlockM = 128;
constexpr int kBlockN = 128;
constexpr int kBlockK = 64;
constexpr int kStages = 3;
constexpr int kThreads = 128;
constexpr int kWarpM = 64;
constexpr int kWarpN = 64;
constexpr int kFragmentsM = kWarpM / 16;
constexpr int kFragmentsN = kWarpN / 8;
constexpr int kSteps = kBlockK / 16;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kBlockM == kTileOuter && kBlockN == kTileOuter, "one tile of each operand");
static_assert(kSharedBytes <= 99 * 1024, "what a CTA may have on sm_120");

// Position of the calling thread's warp in the tile.
__device__ __forceinline__ int32 warp_row() {
    return threadIdx.x / 32 % 2 * kWarpM;
}

__device__ __forceinline__ int32 warp_column() {
    return threadIdx.x / 64 * kWarpN;
}

using Accumulators = float[kFragmentsM][kFragmentsN][4];

struct Fragments {
    uint32 a[kFragmentsM][4];
    uint32 b[kFragmentsN / 2][4];
};

template <bool kAKMajor, bool kBKMajor>
__device__ __forceinline__ void read_fragments(Fragments& fragments, const unsigned char* stage,
                                               int step) {
#pragma unroll
    for (int m = 0; m < kFragmentsM; ++m) {
        tile_fragment<Side::kLeft, kAKMajor>(fragments.a[m], stage, warp_row() + m * 16, step);
    }
#pragma unroll
    for (int n = 0; n < kFragmentsN / 2; ++n) {
        tile_fragment<Side::kRight, kBKMajor>(fragments.b[n], stage + kTileBytes,
                                               warp_column() + n * 16, step);
    }
}

__device__ __forceinline__ void multiply(Accumulators& accumulators, const Fragments& fragments) {
#pragma unroll
    for (int m = 0; m < kFragmentsM; ++m) {
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
            const uint32(&b)[4] = fragments.b[n / 2];
            mma_m16n8k16_bf16(accumulators[m][n], fragments.a[m], b[n % 2 * 2], b[n % 2 * 2 + 1],
                              accumulators[m][n]);
        }
    }
}

// accumulators = the tile of a · b that begins at (row, column). `shared` has kSharedBytes, 16-byte
// aligned, and may be reused on return. a.k == b.k.
template <bool kAKMajor, bool kBKMajor, bool kVector>
__device__ __forceinline__ void mainloop(Accumulators& accumulators, const TileOperand<bf16>& a,
                                        const TileOperand<bf16>& b, int32 row, int32 column,
                                        unsigned char* shared) {
    const TileCopy<bf16, kAKMajor, kVector, kThreads> copy_a(a, row);
    const TileCopy<bf16, kBKMajor, kVector, kThreads> copy_b(b, column);
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

    const int32 tiles = (a.k + kBlockK - 1) / kBlockK;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        if (stage < tiles) {
            copy_a.start(shared + stage * kStageBytes, stage * kBlockK);
            copy_b.start(shared + stage * kStageBytes + kTileBytes, stage * kBlockK);
        }
        if constexpr (kVector) {
            cp_async_commit();
        }
    }

    int32 read_stage = 0;
    int32 write_stage = kStages - 1;
    for (int32 tile = 0; tile < tiles; ++tile) {
        // The tile has arrived for all threads, and all threads have read the stage to be
        // overwritten.
        if constexpr (kVector) {
            cp_async_wait<kStages - 2>();
        }
        __syncthreads();
        const int32 next = tile + kStages - 1;
        if (next < tiles) {
            unsigned char* stage = shared + write_stage * kStageBytes;
            copy_a.start(stage, next * kBlockK);
            copy_b.start(stage + kTileBytes, next * kBlockK);
        }
        if constexpr (kVector) {
            cp_async_commit();
        }

        const unsigned char* stage = shared + read_stage * kStageBytes;
        Fragments fragments[2];
        read_fragments<kAKMajor, kBKMajor>(fragments[0], stage, 0);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step + 1 < kSteps) {
                read_fragments<kAKMajor, kBKMajor>(fragments[(step + 1) % 2], stage, step + 1);
            }
            multiply(accumulators, fragments[step % 2]);
        }
        read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
        write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
    }
    // All threads have read the last stage; the outstanding copy groups are empty.
    __syncthreads();
}

}  // namespace bf16_tile
