// Tiles of a GEMM of two BF16 matrices on wgmma, summed in FP32, in the frame of mma/sm90_tile.cuh.
//
// Each operand is K-major or MN-major, and swizzled by 128 bytes. A part of 64 rows of a in a stage
// lies as 64 rows of 64 along K, or as 64 along K of 64 rows; so do the columns of b.
#pragma once

#include "common/types.cuh"
#include "layout/wgmma_rows.cuh"
#include "mma/sm90_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/tensor_copy_4d.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_bf16.cuh"

namespace sm90_bf16 {

using namespace sm90_tile;

constexpr int kStageK = 64;  // elements
constexpr int kStepK = 16;   // of one wgmma
constexpr int kSteps = kStageK / kStepK;
constexpr int kPart = 64;                            // rows of a, or columns of b
constexpr int kPartBytes = kPart * kStageK * 2;
constexpr int kParts = kTileN / kPart;               // of the tile's columns, and of a wave's rows

// How operands lie in memory.
enum class Layout {
    kRows,     // both K-major: a [M, K], b [N, K]
    kStack,    // a K-major, b MN-major, a matrix [K, N] for each group
    kColumns,  // both MN-major: a [K, M], b [K, N]
};

// Tiles of 256 rows, or 128 of them, and 128 columns. A multiple of 16 along K is multiplied.
template <Layout kOperands>
struct TileShape {
    static constexpr Layout kLayout = kOperands;
    static constexpr int kWaves = 2;
    static constexpr int kAcross = 1;
    static constexpr bool kMayBeOneWave = true;
    static constexpr int kTileM = kWaves * kWaveM;
    static constexpr int kABytes = kTileM * kRowBytes;
    static constexpr int kOperandBytes = kABytes + kTileN * kRowBytes;
    static constexpr int kScaleBytes = 0;
    static constexpr int kStages = kBytesForStages / kOperandBytes;

    static_assert(kStages >= 3 && 2 * kStages * 8 <= kBarrierBytes, "shared memory");
};

// What the producer has copied into a stage.
template <typename S>
__device__ __forceinline__ void copy_stage(const Shared<S>& shared, const TensorMap& a,
                                           const TensorMap& b, const TileWork& work, int32 i,
                                           uint32 stage, uint64* full) {
    mbarrier_expect(full, (work.waves * kWaveM + kTileN) * kRowBytes);
    const uint32 k = work.first_k + i * kStageK;
    uint8* of_a = shared.operands + stage * S::kOperandBytes;
    uint8* of_b = of_a + S::kABytes;
    if constexpr (S::kLayout == Layout::kColumns) {
        for (int32 part = 0; part < work.waves * kParts; ++part) {
            tensor_copy_2d(of_a + part * kPartBytes, a, work.place.row + part * kPart, k, full);
        }
    } else {
        for (int32 wave = 0; wave < work.waves; ++wave) {
            tensor_copy_2d(of_a + wave * kWaveM * kRowBytes, a, k, work.place.row + wave * kWaveM,
                           full);
        }
    }
    if constexpr (S::kLayout == Layout::kRows) {
        tensor_copy_2d(of_b, b, k, work.b_row, full);
    } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const uint32 column = work.place.column + part * kPart;
            if constexpr (S::kLayout == Layout::kStack) {
                const TensorPlace place{{column, k, static_cast<uint32>(work.group), 0}};
                tensor_copy_4d(of_b + part * kPartBytes, b, place, full);
            } else {
                tensor_copy_2d(of_b + part * kPartBytes, b, column, k, full);
            }
        }
    }
}

// sums += a b^T of 64 rows and the `step`-th 16 along K, of operands at these addresses.
template <Layout kLayout>
__device__ __forceinline__ void multiply_step(float (&sums)[64], uint32 a, uint32 b, int step) {
    using OfRows = WgmmaRows<kPart, kStageK>;
    using OfColumns = WgmmaRows<kStageK, kTileN>;
    if constexpr (kLayout == Layout::kColumns) {
        const uint32 at = OfColumns::row_step(step);
        wgmma_bf16_columns(sums, OfColumns::columns(a).at(at), OfColumns::columns(b).at(at));
    } else {
        const uint64 left = OfRows::rows(a).at(OfRows::column_step(step));
        if constexpr (kLayout == Layout::kStack) {
            wgmma_bf16<true, true>(sums, left,
                                   OfColumns::columns(b).at(OfColumns::row_step(step)));
        } else {
            wgmma_bf16<true, false>(sums, left, OfRows::rows(b).at(OfRows::column_step(step)));
        }
    }
}

// Gives a stage back that only wgmma have read: each warp of the consumers waited for them as one.
__device__ __forceinline__ void release_read(uint64* empty) {
    if (threadIdx.x % 32 == 0) {
        mbarrier_arrive(empty);
    }
}

// Adds the stages of the first `kWaves` waves of a tile to the sums of a consumer.
template <int kWaves, typename S>
__device__ __forceinline__ void multiply_waves(const Shared<S>& shared, uint32 consumer,
                                               const TileWork& work, Stage<S>& stage,
                                               float (&sums)[kWaves][64]) {
    const uint32 operands = static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
    constexpr uint32 kWaveBytes = kWaveM * kRowBytes;
    uint64* read = nullptr;  // is empty when the wgmma before those of this stage are done
    for (int32 i = 0; i < work.stages; ++i) {
        wait<S>(shared.full + stage.index, stage.phase);
        const uint32 stage_operands = operands + stage.index * S::kOperandBytes;
        const uint32 a = stage_operands + consumer * kPartBytes;
        const uint32 b = stage_operands + S::kABytes;
        wgmma_fence();
        if (S::kLayout != Layout::kColumns || i + 1 < work.stages || work.last_steps == kSteps) {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
#pragma unroll
                for (int wave = 0; wave < kWaves; ++wave) {
                    multiply_step<S::kLayout>(sums[wave], a + wave * kWaveBytes, b, step);
                }
            }
        } else {
            // What is left of a group is followed by another.
            for (int step = 0; step < work.last_steps; ++step) {
#pragma unroll
                for (int wave = 0; wave < kWaves; ++wave) {
                    multiply_step<S::kLayout>(sums[wave], a + wave * kWaveBytes, b, step);
                }
            }
        }
        wgmma_commit();
        wgmma_wait_read<1>();
        if (read != nullptr) {
            release_read(read);
        }
        read = shared.empty + stage.index;
        stage.advance();
    }
    wgmma_wait(sums[0]);
#pragma unroll
    for (int wave = 1; wave < kWaves; ++wave) {
        wgmma_waited(sums[wave]);
    }
    if (read != nullptr) {
        release_read(read);
    }
}

// All threads of a CTA: `store(work, row, sums, staged)` is that of `multiply_tiles`, with 2 KiB of
// shared memory for a warp.
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
            [&](const TileWork& work, Stage<S>& stage, auto& sums) ALWAYS_INLINE {
                multiply_waves(shared, consumer, work, stage, sums);
            },
            [&](const TileWork& work, uint32 row, const float(&sums)[64]) ALWAYS_INLINE {
                store(work, row, sums, staged);
            });
    };
    run_roles(shared, produce, consume);
}

}  // namespace sm90_bf16
