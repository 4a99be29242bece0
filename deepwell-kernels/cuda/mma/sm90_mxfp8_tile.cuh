// Tiles of an MXFP8 GEMM on wgmma, both operands K-major, with one scale per 128 elements along K.
// wgmma has no scales: each 128 along K is accumulated separately and then promoted: multiplied by
// the scales of row and column and added to the sums in FP32.
//
// Warp roles are those of mma/sm90_tile.cuh. Operands have a 128-byte swizzle; scale tiles are
// copied with them. Consumers take turns in issuing wgmma: while the wgmma of one run, the other
// promotes. CTAs of a cluster each multicast a part of the rows of a.
//
// If each column has a scale, promotion takes two instructions per element, an FMUL by the row
// factor and an FFMA by the column factor. Looking up the scales in their tiles cost as many
// instructions as one of these two. So a second warp of the producer's warpgroup converts scales to
// factors, in the order in which consumers read them. Shared memory bandwidth is shared by wgmma
// operands and the column factors of consumers, so column factors have only two bytes.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "layout/scale_tile.cuh"
#include "layout/wgmma_descriptor.cuh"
#include "mma/mxfp8_factors.cuh"
#include "mma/sm90_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared_load.cuh"
#include "ptx/tensor_copy.cuh"
#include "ptx/wgmma.cuh"

namespace sm90_mxfp8 {

using namespace sm90_tile;

constexpr int kStageK = kRowBytes;  // elements
constexpr int kStepK = 32;    // per wgmma
constexpr int kSteps = kStageK / kStepK;
constexpr int kScaleBoxes = 2;  // rows of 256 bytes of a scale tile, as in tensor maps
// Stride between the column factors of neighboring threads of a quad: 32 factors, and padding
// against bank conflicts. A column factor is the upper half of a float, which holds a power of two
// exactly.
constexpr uint32 kQuadFactors = 32 + 8;
constexpr int kFactorBytesOfColumns = 4 * kQuadFactors * 2;

// A tile of 128 columns. `kScalesByColumn`: each column has a scale; otherwise 128 columns, from a
// multiple of 128 on, share one. `kByWaves`: a tile may have only one wave. `kStagedBytes`: staging
// bytes per warp; if more than the minimum, results are stored by TMA, which takes little time of a
// consumer, and a wave at a time (`kStoresEarly`).
template <int kWavesOfTile, int kCtasAcross, bool kScalesByColumn, bool kByWaves = false,
          int kStagedBytes = kStagedSubtileBytes>
struct TileShape {
    static constexpr int kStagedWarpBytes = kStagedBytes;
    static constexpr bool kStoresEarly = kStagedBytes != kStagedSubtileBytes;
    static constexpr int kWaves = kWavesOfTile;
    static constexpr int kAcross = kCtasAcross;
    static constexpr int kClusterCtas = kAcross;
    static constexpr int kTileN = sm90_tile::kTileN;
    static constexpr bool kColumnScales = kScalesByColumn;
    static constexpr bool kHasFactors = kColumnScales;
    static constexpr bool kMayBeOneWave = kByWaves;
    static constexpr int kTileM = kWaves * kWaveM;
    static constexpr int kCopiedM = kTileM / kAcross;  // rows of a that a CTA copies
    static constexpr int kBoxM = kMayBeOneWave ? kWaveM : kCopiedM;  // rows of a box of a
    static constexpr int kABytes = kTileM * kStageK;
    static constexpr int kOperandBytes = kABytes + kTileN * kStageK;
    static constexpr int kScaleTilesOfA = kTileM / kScaleTileRows;
    static constexpr int kCopiedScaleBytes = (kScaleTilesOfA + 1) * kScaleTileBytes;
    // Followed by the factors of columns, of rows, and whether any scale is wide.
    static constexpr int kRowFactorsAt = kFactorBytesOfColumns;
    static constexpr int kWideAt = kRowFactorsAt + kTileM * 4;
    // Rounded to 128 bytes, the alignment of boxes.
    static constexpr int kFactorBytes = kColumnScales ? (kWideAt + 4 + 127) / 128 * 128 : 0;
    static constexpr int kScaleBytes = kCopiedScaleBytes + kFactorBytes;
    static constexpr int kStageBytes = kOperandBytes + kScaleBytes;
    static constexpr int kStages = bytes_for_stages(kStagedWarpBytes) / kStageBytes;

    static_assert(kTileM % kScaleTileRows == 0 && kTileN == kScaleTileRows, "whole scale tiles");
    static_assert(kBoxM % 8 == 0 && kBoxM <= 256, "whole swizzles, and what a box may have");
    static_assert(!kMayBeOneWave || kAcross == 1, "CTAs of a cluster have as many waves");
    static_assert(kStages >= 3 && 2 * kStages * 8 <= kBarrierBytes, "shared memory");
};

// A matrix: E4M3 [rows, k] in boxes of a stage, 128-byte swizzle, and scales in boxes of a scale
// tile, as a matrix of 256 columns.
struct Operand {
    const TensorMap& elements;
    const TensorMap& scales;
};

// Copies scale tile `k_block` of row `row` of scale tiles, which has `k_blocks` tiles.
__device__ __forceinline__ void copy_scale_tile(uint8* target, const Operand& operand, uint32 row,
                                                int32 k_block, int32 k_blocks, uint64* full) {
    const uint32 tile = row * k_blocks + k_block;
    tensor_copy_2d(target, operand.scales, 0, tile * kScaleBoxes, full);
}

// Issues the producer's copies into a stage; a row of scale tiles has `k_blocks` tiles.
template <typename S>
__device__ __forceinline__ void copy_stage(const Shared<S>& shared, const Operand& a,
                                           const Operand& b, int32 k_blocks, const TileWork& work,
                                           int32 i, uint32 stage, uint64* full) {
    constexpr uint16 kAll = (1 << S::kAcross) - 1;
    constexpr uint32 kWaveBytes = kWaveM * kStageK + kWaveM / kScaleTileRows * kScaleTileBytes;
    const uint32 first_row = S::kAcross == 1 ? 0 : cluster_rank() * S::kCopiedM;
    const int32 waves = S::kMayBeOneWave ? work.waves : S::kWaves;
    // redundant release of mbarrier.arrive: the arrival publishes no writes of this thread
    mbarrier_expect(full, S::kOperandBytes + S::kCopiedScaleBytes -
                              (S::kWaves - waves) * kWaveBytes);
    const uint32 k = work.first_k + i * kStageK;
    uint8* operands = shared.operands + stage * S::kOperandBytes;
    uint8* rows = operands + first_row * kStageK;
    if constexpr (S::kAcross == 1) {
#pragma unroll
        for (int row = 0; row < S::kWaves * kWaveM; row += S::kBoxM) {
            if (row < waves * kWaveM) {
                tensor_copy_2d(rows + row * kStageK, a.elements, k, work.place.row + row, full);
            }
        }
    } else {
        tensor_copy_2d_multicast(rows, a.elements, k, work.place.row + first_row, full, kAll);
    }
    tensor_copy_2d(operands + S::kABytes, b.elements, k, work.b_row, full);
    const int32 k_block = k / kStageK;
    uint8* scales = shared.scales + stage * S::kScaleBytes;
#pragma unroll
    for (int wave = 0; wave < S::kWaves; ++wave) {
        if (wave < waves) {
            copy_scale_tile(scales + wave * kScaleTileBytes, a,
                            work.place.row / kScaleTileRows + wave, k_block, k_blocks, full);
        }
    }
    // redundant coordinate 0 of cp.async.bulk.tensor: scales of squares fill their tile
    copy_scale_tile(scales + S::kScaleTilesOfA * kScaleTileBytes, b, work.b_scale_row, k_block,
                    k_blocks, full);
}

constexpr uint32 kFirstBarrier = 1;  // named barriers of consumers
constexpr uint32 kBothThreads = kConsumers * kWarpgroup;

// Consumers take turns in issuing wgmma, beginning with consumer 0.
class Turn {
    uint32 consumer_;

  public:
    __device__ __forceinline__ explicit Turn(uint32 consumer) : consumer_(consumer) {
        if (consumer_ == 1) {
            pass();
        }
    }

    __device__ __forceinline__ void await() const {
        barrier_sync(kFirstBarrier + consumer_, kBothThreads);
    }

    __device__ __forceinline__ void pass() const {
        barrier_arrive(kFirstBarrier + (consumer_ ^ 1), kBothThreads);
    }

    // Consumes the last pass of consumer 1.
    __device__ __forceinline__ void end() const {
        if (consumer_ == 0) {
            await();
        }
    }
};

// Whether a scale lies outside 2^-63 to 2^63.
__device__ __forceinline__ bool is_wide(uint32 code) {
    return code - (kE8m0One - 63) > 126;
}

// Adds a thread's four values of eight columns, scaled, to its sums.
template <typename Factor>
__device__ __forceinline__ void add_scaled(float (&sums)[64], const float (&partial)[64],
                                           int eight, const Factor (&rows)[2],
                                           const Factor (&columns)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float& sum = sums[eight * 4 + i];
        sum = Factor::add_scaled(sum, partial[eight * 4 + i], rows[i / 2], columns[i % 2]);
    }
}

// Scales of a thread's accumulators in a stage. A row of a scale tile has four bytes, one per 32
// elements along K. As 128 elements share a scale, only the first byte is read; the other bytes may
// lie beyond K.
template <typename S>
class Scales {
    uint32 columns_;  // shared address of the scale tile of b
    uint32 rows_[2];  // of rows lane / 4 and 8 + lane / 4 of the warp's 16
    uint32 column_;   // of all columns, if they share a scale

  public:
    // Shared addresses of the scale of this thread's first row, and of the scale tile of b.
    __device__ __forceinline__ Scales(uint32 rows, uint32 columns) {
        constexpr uint32 kEightRows = 8 * 16;  // bytes of a scale tile, in each run of 32 rows
        rows_[0] = shared_load_byte(rows);
        rows_[1] = shared_load_byte(rows + kEightRows);
        columns_ = columns;
        column_ = S::kColumnScales ? kE8m0One : shared_load_byte(columns);
    }

    // Whether any row scale of the warp, or a shared column scale, is wide.
    __device__ __forceinline__ bool any_wide() const {
        return __any_sync(0xffffffff,
                          is_wide(rows_[0]) || is_wide(rows_[1]) || is_wide(column_));
    }

    // sums += partial, scaled.
    template <typename Factor>
    __device__ __forceinline__ void promote(float (&sums)[64], const float (&partial)[64]) const {
        const Factor rows[2] = {Factor::of(rows_[0], false), Factor::of(rows_[1], false)};
        if constexpr (S::kColumnScales) {
            const uint32 pair = threadIdx.x % 4 * 2;
#pragma unroll
            for (int eight = 0; eight < 4; ++eight) {
                // Scales of columns that are 32 apart.
                const uint4 low = quad(eight * 8 + pair);
                const uint4 high = quad(eight * 8 + pair + 1);
                const uint32 scale_bytes[4][2] = {
                    {low.x, high.x}, {low.y, high.y}, {low.z, high.z}, {low.w, high.w}};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const Factor columns[2] = {Factor::of(scale_bytes[i][0] & 0xff, true),
                                               Factor::of(scale_bytes[i][1] & 0xff, true)};
                    add_scaled(sums, partial, i * 4 + eight, rows, columns);
                }
            }
        } else {
            const Factor column = Factor::of(column_, true);
            const Factor columns[2] = {column, column};
#pragma unroll
            for (int eight = 0; eight < kTileN / 8; ++eight) {
                add_scaled(sums, partial, eight, rows, columns);
            }
        }
    }

  private:
    // Scales of columns `column`, 32 + `column`, 64 + `column` and 96 + `column`, in the lowest
    // byte of each word.
    __device__ __forceinline__ uint4 quad(uint32 column) const {
        return shared_load_uint4(columns_ + scale_row_place(column));
    }
};

// Position, in factors, of the factor of a column of a tile. The factors of a quad's thread q,
// columns 2 q and 2 q + 1 of each eight, are contiguous.
__device__ __forceinline__ uint32 column_factor_place(uint32 column) {
    return column % 8 / 2 * kQuadFactors + column / 8 * 2 + column % 2;
}

// By a warp: converts the scales of a scale tile's 128 rows to factors at `place(row)`, and returns
// whether any scale of the calling lane is wide. A factor is the upper bits of a float, as many as
// an `Element` has. All pointers are to shared memory.
template <typename Element, typename Place>
__device__ __forceinline__ bool make_factors(Element* factors, const uint8* scale_tile,
                                             Place place) {
    constexpr int kExponentAt = static_cast<int>(sizeof(Element)) * 8 - 9;
    const uint32 lane = threadIdx.x % 32;
    const uint4 four = *reinterpret_cast<const uint4*>(scale_tile + scale_row_place(lane));
    const uint32 codes[4] = {four.x & 0xff, four.y & 0xff, four.z & 0xff, four.w & 0xff};
    bool wide = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        wide = wide || is_wide(codes[i]);
        factors[place(i * 32 + lane)] = static_cast<Element>(codes[i] << kExponentAt);
    }
    return wide;
}

// By the second warp of the producer's warpgroup: the factors of each stage. Unused if any scale is
// wide.
template <typename S, typename Tiles>
__device__ __forceinline__ void prepare_factors(const Shared<S>& shared, Tiles tiles) {
    Stage<S> stage;
    for (TileWork work; tiles.next(work);) {
        const int32 waves = S::kMayBeOneWave ? work.waves : S::kWaves;
        for (int32 i = 0; i < work.stages; ++i) {
            // redundant scope of fence: the scales arrive by copies of this CTA
            wait<S>(shared.full + stage.index, stage.phase);
            uint8* const scales = shared.scales + stage.index * S::kScaleBytes;
            uint8* const made = scales + S::kCopiedScaleBytes;
            bool wide = make_factors(reinterpret_cast<uint16*>(made),
                                     scales + S::kScaleTilesOfA * kScaleTileBytes,
                                     [](uint32 column) { return column_factor_place(column); });
            for (int32 wave = 0; wave < waves; ++wave) {
                uint32* const rows = reinterpret_cast<uint32*>(made + S::kRowFactorsAt);
                wide |= make_factors(rows + wave * kScaleTileRows,
                                     scales + wave * kScaleTileBytes,
                                     [](uint32 row) { return row; });
            }
            wide = __any_sync(0xffffffff, wide);
            if (threadIdx.x % 32 == 0) {
                *reinterpret_cast<uint32*>(made + S::kWideAt) = wide;
            }
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                mbarrier_arrive(shared.ready + stage.index);
            }
            stage.advance();
        }
    }
}

// Factors of a thread's accumulators in a stage, in the layout of `prepare_factors`.
class Factors {
    static constexpr int kParts = kTileN / 32;
    uint32 columns_;
    float rows_[2];

  public:
    // Shared addresses of the factor of this thread's first row, and of the column factors.
    __device__ __forceinline__ Factors(uint32 rows, uint32 columns)
        : columns_(columns + threadIdx.x % 4 * (kQuadFactors * 2)),
          rows_{shared_load_f32(rows), shared_load_f32(rows + 8 * 4)} {}

    // sums += partial * row factor * column factor. The row factor comes first, so that the FFMAs
    // of two rows share the register of the column factor. Nonzero partial sums have magnitudes
    // from 2^-18 to 2^25, so the first product is exact, and the result is the same as with the
    // product of both factors.
    __device__ __forceinline__ void promote(float (&sums)[64], const float (&partial)[64]) const {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const uint4 four = shared_load_uint4(columns_ + part * 16);
            const uint32 pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int eight = 0; eight < 4; ++eight) {
                const float columns[2] = {__uint_as_float(pairs[eight] << 16),
                                          __uint_as_float(pairs[eight] & 0xffff0000u)};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = part * 16 + eight * 4 + i;
                    sums[at] = fmaf(partial[at] * rows_[i / 2], columns[i % 2], sums[at]);
                }
            }
        }
    }
};

// Issues the wgmma of a wave for the 128 along K of a stage, given operand descriptors.
__device__ __forceinline__ void multiply_stage(float (&partial)[64], uint64 a, uint64 b) {
    constexpr uint32 kStep = kStepK / kMatrixUnit;
    wgmma_fence();
    // redundant leading offset of A, leading offset of B: none in rows that are swizzled
    wgmma_m64n128k32_e4m3<false>(partial, a, b);
#pragma unroll
    for (int step = 1; step < kSteps; ++step) {
        // redundant leading offset of A, leading offset of B: none in rows that are swizzled
        wgmma_m64n128k32_e4m3<true>(partial, a + step * kStep, b + step * kStep);
    }
    wgmma_commit();
}

// Adds the stages of the first `kWaves` waves of a tile to the sums of a consumer. With
// `kStoresEarly` a wave is stored while the wgmma of the next wave run. `base` is the address of
// shared memory.
//
// A consumer has a single partial accumulator, so few instructions may come between two wgmma
// groups: addresses and descriptors are sums of loop invariants, and the next stage's barrier is
// polled before the promotion instead of after it. The rest is bound by register ports: the 64
// additions of a wave read 192 registers while wgmma reads and writes its own, and take 2.4 cycles
// each instead of one.
template <int kWaves, typename S, typename StoreWave>
__device__ __forceinline__ void multiply_waves(uint32 base, uint32 consumer, const Turn& turn,
                                               int32 stages, Stage<S>& stage,
                                               float (&sums)[kWaves][64],
                                               StoreWave store_wave) {
    const uint32 scales = base + Shared<S>::kScalesAt;
    const uint32 full = base + Shared<S>::kFullAt;
    const uint32 empty = base + Shared<S>::kEmptyAt;
    const uint32 ready = base + Shared<S>::kReadyAt;
    const uint32 row = consumer * kConsumerM + threadIdx.x % kWarpgroup / 32 * 16 +
                       threadIdx.x % 32 / 4;
    const uint32 row_scales = scales + scale_row_place(row);
    const uint32 column_scales = scales + S::kScaleTilesOfA * kScaleTileBytes;
    const uint32 column_factors = scales + S::kCopiedScaleBytes;
    const uint32 row_factors = column_factors + S::kRowFactorsAt + row * 4;
    const uint64 a = wgmma_swizzled_matrix(base) + consumer * (kConsumerM * kStageK / kMatrixUnit);
    const uint64 b = wgmma_swizzled_matrix(base) + S::kABytes / kMatrixUnit;
    bool is_full = false;
    for (int32 i = 0; i < stages; ++i) {
        if (!is_full) {
            wait<S>(full + stage.index * 8, stage.phase);
        }
        const uint32 index = stage.index;
        const uint64 operands = index * (S::kOperandBytes / kMatrixUnit);
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
            constexpr uint32 kWaveUnits = kWaveM * kStageK / kMatrixUnit;
            float partial[64];
            turn.await();
            // redundant wgmma.fence: the fence of the first wave follows all reads of the
            // accumulator
            multiply_stage(partial, a + operands + wave * kWaveUnits, b + operands);
            turn.pass();
            if (S::kStoresEarly && wave > 0 && i + 1 == stages) {
                store_wave(wave - 1);
            }
            const uint32 stage_scales = index * S::kScaleBytes;
            const uint32 wave_scales = stage_scales + wave * kScaleTileBytes;
            const bool is_last = wave + 1 == kWaves;
            if constexpr (S::kColumnScales) {
                if (wave == 0) {
                    mbarrier_wait(ready + index * 8, stage.phase);
                }
                const Factors factors(row_factors + stage_scales + wave * kScaleTileRows * 4,
                                      column_factors + stage_scales);
                const bool any_wide =
                    shared_load_byte(column_factors + stage_scales + S::kWideAt) != 0;
                wgmma_wait(partial);
                if (any_wide) {
                    const Scales<S> wide(row_scales + wave_scales, column_scales + stage_scales);
                    wide.template promote<mxfp8_tile::WideFactor>(sums[wave], partial);
                } else {
                    factors.promote(sums[wave], partial);
                }
                if (is_last) {
                    // redundant scope of fence: lanes have read scales, which this CTA copied
                    release<S>(empty + index * 8);
                    stage.advance();
                }
            } else {
                const Scales<S> factors(row_scales + wave_scales, column_scales + stage_scales);
                const bool any_wide = factors.any_wide();
                wgmma_wait(partial);
                if (is_last) {
                    // redundant scope of fence: lanes have read scales, which this CTA copied
                    release<S>(empty + index * 8);
                    stage.advance();
                    const bool has_next = i + 1 < stages;
                    // redundant mbarrier.wait: if the poll does not see a full stage, a wait
                    // follows
                    // redundant parity 0 of mbarrier.wait, parity 1 of mbarrier.wait: the same
                    is_full = has_next && is_over<S>(full + stage.index * 8, stage.phase);
                }
                if (any_wide) {
                    factors.template promote<mxfp8_tile::WideFactor>(sums[wave], partial);
                } else {
                    factors.template promote<mxfp8_tile::NarrowFactor>(sums[wave], partial);
                }
            }
        }
    }
}

// All threads of a CTA; `store(work, row, sums, staged)` is the `store` of `multiply_tiles`, with
// `kStagedWarpBytes` of shared memory per warp. Rows of scale tiles of both operands have
// `k_blocks` tiles.
template <typename S, typename Tiles, typename Store>
__device__ __forceinline__ void multiply(uint8* memory, const Operand& a, const Operand& b,
                                         const Tiles& tiles, int32 k_blocks, Store store) {
    const Shared<S> shared(memory);
    const auto produce = [&]() ALWAYS_INLINE {
        copy_tiles(shared, tiles,
                   [&](const TileWork& work, int32 i, uint32 stage, uint64* full) ALWAYS_INLINE {
                       copy_stage(shared, a, b, k_blocks, work, i, stage, full);
                   });
    };
    const auto prepare = [&]() ALWAYS_INLINE {
        if constexpr (S::kColumnScales) {
            prepare_factors(shared, tiles);
        }
    };
    const auto consume = [&](uint32 consumer, uint8* staged) ALWAYS_INLINE {
        const Turn turn(consumer);
        const uint32 base =
            static_cast<uint32>(__cvta_generic_to_shared(shared.operands));
        multiply_tiles<S>(
            consumer, tiles,
            [&](const TileWork& work, Stage<S>& stage, auto& sums, auto store_wave)
                ALWAYS_INLINE {
                    multiply_waves(base, consumer, turn, work.stages, stage, sums, store_wave);
                },
            [&](const TileWork& work, uint32 row, const float(&sums)[64]) ALWAYS_INLINE {
                store(work, row, sums, staged);
            });
        // redundant bar.sync: no thread waits after the last turn; this only completes the barrier
        turn.end();
    };
    run_roles(shared, produce, prepare, consume);
}

}  // namespace sm90_mxfp8
