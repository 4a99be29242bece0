// Tiles of a BF16 GEMM on wgmma with FP32 accumulation; warp roles as in mma/sm90_tile.cuh.
//
// Each operand is K-major or MN-major, with 128-byte swizzle. In a stage, a part of 64 rows of a is
// stored as 64 rows of 64 along K, or as 64 along K of 64 rows; so are the columns of b. Tiles of a
// cluster are one below another: each CTA multicasts a part of the columns of b to all of them.
#pragma once

#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"

namespace sm90_bf16 {

using namespace sm90_tile;

constexpr int kStageK = 64;  // elements
constexpr int kStepK = 16;   // per wgmma
constexpr int kSteps = kStageK / kStepK;
constexpr int kPart = 64;                            // rows of a, or columns of b
constexpr int kPartBytes = kPart * kStageK * 2;
constexpr int kWaveParts = kWaveM / kPart;
constexpr int kBoxRows = 128;  // of a K-major operand

// Storage orders of the operands.
enum class Layout {
    kRows,     // both K-major: a [M, K], b [N, K]
    kMixed,    // a K-major, b MN-major [K, N]
    kStack,    // as kMixed, with a matrix b for each group
    kColumns,  // both MN-major: a [K, M], b [K, N]
};

// Tiles of 128 rows for each wave. `kByWaves`: a tile may have one wave of two. `kCtasDown`: CTAs
// of a cluster. K is processed in multiples of 16; K may end within a stage if operands are
// MN-major or `kByGroups`, as elements of another group follow.
template <Layout kOperands, int kWavesOfTile, int kColumns, int kCtasDown = 1,
          bool kByWaves = false, bool kByGroups = false>
struct TileShape {
    static constexpr Layout kLayout = kOperands;
    static constexpr int kWaves = kWavesOfTile;
    static constexpr int kDown = kCtasDown;
    static constexpr int kClusterCtas = kDown;
    static constexpr bool kMayBeOneWave = kByWaves;
    static constexpr bool kEndsEarly = kLayout == Layout::kColumns || kByGroups;
    static constexpr int kTileM = kWaves * kWaveM;
    static constexpr int kTileN = kColumns;
    static constexpr int kCopiedN = kTileN / kDown;  // columns of b that a CTA copies
    static constexpr int kABytes = kTileM * kRowBytes;
    static constexpr int kOperandBytes = kABytes + kTileN * kRowBytes;
    static constexpr int kScaleBytes = 0;
    static constexpr bool kHasFactors = false;
    static constexpr bool kStoresEarly = false;
    static constexpr int kStagedWarpBytes = kStagedSubtileBytes;
    static constexpr int kStages = bytes_for_stages(kStagedWarpBytes) / kOperandBytes;

    static_assert(kCopiedN % kBoxRows == 0, "whole boxes");
    static_assert(kDown == 1 || (!kMayBeOneWave && kLayout != Layout::kStack),
                  "tiles of a cluster have as many waves, and boxes of two dimensions");
    static_assert(kStages >= 3 && 2 * kStages * 8 <= kBarrierBytes, "shared memory");
};

// Copies a box of b to all CTAs of the cluster.
template <typename S>
__device__ __forceinline__ void copy_shared(uint8* target, const TensorMap& b, uint32 column,
                                            uint32 row, uint64* full) {
    if constexpr (S::kDown == 1) {
        tensor_copy_2d(target, b, column, row, full);
    } else {
        constexpr uint16 kAll = (1 << S::kDown) - 1;
        tensor_copy_2d_multicast(target, b, column, row, full, kAll);
    }
}

// Issues the producer's copies into a stage.
template <typename S>
__device__ __forceinline__ void copy_stage(const Shared<S>& shared, const TensorMap& a,
                                           const TensorMap& b, const TileWork& work, int32 i,
                                           uint32 stage, uint64* full) {
    const int32 waves = S::kMayBeOneWave ? work.waves : S::kWaves;
    // redundant release of mbarrier.arrive: the arrival publishes no writes of this thread
    mbarrier_expect(full, (waves * kWaveM + S::kTileN) * kRowBytes);
    const uint32 k = work.first_k + i * kStageK;
    uint8* of_a = shared.operands + stage * S::kOperandBytes;
    uint8* of_b = of_a + S::kABytes;
    if constexpr (S::kLayout == Layout::kColumns) {
        for (int32 part = 0; part < waves * kWaveParts; ++part) {
            tensor_copy_2d(of_a + part * kPartBytes, a, work.place.row + part * kPart, k, full);
        }
    } else {
        for (int32 wave = 0; wave < waves; ++wave) {
            tensor_copy_2d(of_a + wave * kWaveM * kRowBytes, a, k, work.place.row + wave * kWaveM,
                           full);
        }
    }
    // The columns of b that this CTA copies.
    const uint32 first = S::kDown == 1 ? 0 : cluster_rank() * S::kCopiedN;
    of_b += first * kRowBytes;
    if constexpr (S::kLayout == Layout::kRows) {
#pragma unroll
        for (int row = 0; row < S::kCopiedN; row += kBoxRows) {
            copy_shared<S>(of_b + row * kRowBytes, b, k, work.b_row + first + row, full);
        }
    } else {
#pragma unroll
        for (int part = 0; part < S::kCopiedN / kPart; ++part) {
            const uint32 column = work.place.column + first + part * kPart;
            if constexpr (S::kLayout == Layout::kStack) {
                const TensorPlace place{{column, k, static_cast<uint32>(work.group), 0}};
                tensor_copy_4d(of_b + part * kPartBytes, b, place, full);
            } else {
                copy_shared<S>(of_b + part * kPartBytes, b, column, k, full);
            }
        }
    }
}

// sums += a b^T over 64 rows and the `step`-th 16 along K, of operands at these addresses.
template <typename S>
__device__ __forceinline__ void multiply_step(float (&sums)[S::kTileN / 2], uint32 a, uint32 b,
                                              int step) {
    using OfRows = WgmmaRows<kPart, kStageK>;
    using OfColumns = WgmmaRows<kStageK, S::kTileN>;
    // Only b has a leading offset, and only if it has more columns than the 64 of a swizzled part.
    if constexpr (S::kLayout == Layout::kColumns) {
        const uint32 at = OfColumns::row_step(step);
        // redundant leading offset of A, leading offset of B: unused in a single part of 64 columns
        wgmma_bf16_columns(sums, OfColumns::columns(a).at(at), OfColumns::columns(b).at(at));
    } else {
        const uint64 left = OfRows::rows(a).at(OfRows::column_step(step));
        if constexpr (S::kLayout == Layout::kRows) {
            // redundant leading offset of A, leading offset of B: unused in swizzled K-major rows
            wgmma_bf16<true, false>(sums, left, OfRows::rows(b).at(OfRows::column_step(step)));
        } else {
            // redundant leading offset of A: unused in swizzled K-major rows
            // redundant leading offset of B: unused in a single part of 64 columns
            wgmma_bf16<true, true>(sums, left,
                                   OfColumns::columns(b).at(OfColumns::row_step(step)));
        }
    }
}

// Adds the stages of the first `kWaves` waves of a tile to the accumulators of a consumer.
template <int kWaves, typename S>
__device__ __forceinline__ void multiply_waves(const Shared<S>& shared, uint32 consumer,
                                               const TileWork& work, Stage<S>& stage,
                                               float (&sums)[kWaves][S::kTileN / 2]) {
    const uint32 operands = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    constexpr uint32 kWaveBytes = kWaveM * kRowBytes;
    uint64* read = nullptr;  // empty barrier of the previous stage, not yet released
    for (int32 i = 0; i < work.stages; ++i) {
        wait<S>(shared.full + stage.index, stage.phase);
        const uint32 stage_operands = operands + stage.index * S::kOperandBytes;
        const uint32 a = stage_operands + consumer * kPartBytes;
        const uint32 b = stage_operands + S::kABytes;
        wgmma_fence();
        if (!S::kEndsEarly || i + 1 < work.stages || work.last_steps == kSteps) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int wave = 0; wave < kWaves; ++wave) {
                    multiply_step<S>(sums[wave], a + wave * kWaveBytes, b, step);
                }
            }
        } else {
            // The rest of the stage belongs to another group. Four steps never run here: not
            // unrolled.
#pragma unroll 1
            for (int step = 0; step < work.last_steps; ++step) {
#pragma unroll
                for (int wave = 0; wave < kWaves; ++wave) {
                    multiply_step<S>(sums[wave], a + wave * kWaveBytes, b, step);
                }
            }
        }
        wgmma_commit();
        wgmma_wait_read<1>();
        if (read != nullptr) {
            // redundant scope of fence: only wgmma read the stage, and the warp waited for them
            release_read<S>(read);
        }
        read = shared.empty + stage.index;
        stage.advance();
    }
    wgmma_wait_for<0>(sums[0]);
    if constexpr (kWaves == 2) {
        wgmma_waited(sums[1]);
    }
    if (read != nullptr) {
        // redundant scope of fence: only wgmma read the stage, and the warp waited for them
        release_read<S>(read);
    }
}

// All threads of a CTA; `store(work, row, sums, staged)` is the `store` of `multiply_tiles`, with 2
// KiB of shared memory per warp.
template <typename S, typename Tiles, typename Store>
__device__ __forceinline__ void multiply(uint8* memory, const TensorMap& a, const TensorMap& b,
                                         const Tiles& tiles, Store store) {
    const Shared<S> shared(memory);
    const auto produce = [&]() ALWAYS_INLINE {
        copy_tiles(shared, tiles,
                   [&](const TileWork& work, int32 i, uint32 stage, uint64* full) ALWAYS_INLINE {
                       copy_stage(shared, a, b, work, i, stage, full);
                   });
    };
    const auto consume = [&](uint32 consumer, uint8* staged) ALWAYS_INLINE {
        multiply_tiles<S>(
            consumer, tiles,
            [&](const TileWork& work, Stage<S>& stage, auto& sums, auto) ALWAYS_INLINE {
                multiply_waves(shared, consumer, work, stage, sums);
            },
            [&](const TileWork& work, uint32 row,
                const float(&sums)[S::kTileN / 2]) ALWAYS_INLINE {
                store(work, row, sums, staged);
            });
    };
    const auto prepare = []() {};
    run_roles(shared, produce, prepare, consume);
}

}  // namespace sm90_bf16
