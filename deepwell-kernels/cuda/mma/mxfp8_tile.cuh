// One 128 x 128 tile of a product of two MXFP8 matrices, both stored by depth, by 256 threads.
//
// Each step of 32 in depth is one product into accumulators that start at zero, which is then
// multiplied by 2^(sa + sb), the scales of its row and its column, and added in FP32. Tiles of 128
// in depth pass through a ring of three stages, each with two 16 KiB tiles of codes, copied by
// cp.async two steps ahead, and the scales of their rows, which threads fetch while a tile before
// is multiplied. Each of the eight warps holds 64 x 32 of
// the result.
//
// The factor of an element, 2^(sa + sb), need not be an FP32 even where the scaled product is one.
// While all scales of a tile lie within 2^-63 and 2^63 it is, and one multiplication per element
// makes it; otherwise each scale is taken as the product of two roots, and halves of the factor are
// applied one after the other.
#pragma once

#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/operand_tile.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mma_sync.cuh"

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
static_assert(kSharedBytes <= 99 * 1024, "what a block may have on sm_120");

// An operand: codes [outer, depth] and scales [outer, ceil(depth / 32)], by rows.
struct Operand {
    const uint8* codes;
    const uint8* scales;
    int32 outer;
    int32 depth;
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
    const uint8* scales_;  // of the row; null outside of the matrix
    int32 blocks_;

  public:
    __device__ __forceinline__ ScaleFetch(const Operand& a, const Operand& b, int32 row,
                                          int32 column) {
        const int32 thread = threadIdx.x;
        const bool of_a = thread < kBlockM;
        const int32 outer = of_a ? row + thread : column + thread - kBlockM;
        const int32 extent = of_a ? a.outer : b.outer;
        const uint8* scales = of_a ? a.scales : b.scales;
        blocks_ = (a.depth + kScaleBlock - 1) / kScaleBlock;
        scales_ = outer < extent ? scales + static_cast<int64>(outer) * blocks_ : nullptr;
    }

    // The scales of the four blocks of tile `tile`; ones where there is nothing.
    __device__ __forceinline__ uint32 fetch(int32 tile) const {
        uint32 word = kE8m0One * 0x01010101u;
        if (scales_ != nullptr) {
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                const int32 block = tile * kSteps + i;
                if (block < blocks_) {
                    const uint32 code = scales_[block];
                    word ^= (code ^ kE8m0One) << (8 * i);
                }
            }
        }
        return word;
    }
};

// Whether one of four scales lies outside of 2^-63 to 2^63.
__device__ __forceinline__ bool is_wide(uint32 word) {
    bool wide = false;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const uint32 code = word >> (8 * i) & 0xff;
        wide |= code - (kE8m0One - 63) > 126;
    }
    return wide;
}

// A scale between 2^-63 and 2^63, as a factor.
struct NarrowFactor {
    float whole;

    static __device__ __forceinline__ NarrowFactor of(uint32 code, bool) {
        return NarrowFactor{__uint_as_float(code << 23)};
    }

    static __device__ __forceinline__ float add_scaled(float sum, float value, NarrowFactor row,
                                                       NarrowFactor column) {
        return fmaf(value, row.whole * column.whole, sum);
    }
};

// A scale of any size, as two factors of about its root. Rows round the exponent of the first down,
// columns up, so that the products of firsts and of seconds stay within 2^-127 to 2^127.
struct WideFactor {
    float first;
    float second;

    static __device__ __forceinline__ WideFactor of(uint32 code, bool of_column) {
        const int32 exponent = static_cast<int32>(code) - 127;
        const int32 half = (exponent + of_column) >> 1;
        const float first = __uint_as_float(static_cast<uint32>(half + 127) << 23);
        const float second = __uint_as_float(static_cast<uint32>(exponent - half + 127) << 23);
        return WideFactor{code == 255 ? __uint_as_float(0x7fc00000u) : first, second};
    }

    static __device__ __forceinline__ float add_scaled(float sum, float value, WideFactor row,
                                                       WideFactor column) {
        return fmaf(value * (row.first * column.first), row.second * column.second, sum);
    }
};

// Adds the product of a stage.
template <typename Factor>
__device__ __forceinline__ void multiply(Accumulators& accumulators, const unsigned char* stage) {
    const int32 lane = threadIdx.x % 32;
    const unsigned char* row_scales = stage + 2 * kTileBytes + warp_row() + lane / 4;
    const unsigned char* column_scales =
        stage + 2 * kTileBytes + kBlockM + warp_column() + lane % 4 * 2;
    // Unrolled, the steps' fragments would not fit the registers.
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
        uint32 b[kFragmentsN / 2][4];
        Factor columns[kFragmentsN][2];
#pragma unroll
        for (int n = 0; n < kFragmentsN / 2; ++n) {
            tile_fragment<Side::kRight, true>(b[n], stage + kTileBytes, warp_column() + n * 16,
                                              step);
        }
#pragma unroll
        for (int n = 0; n < kFragmentsN; ++n) {
            const uint32 pair = *reinterpret_cast<const uint16*>(column_scales + n * 8);
            columns[n][0] = Factor::of(pair & 0xff, true);
            columns[n][1] = Factor::of(pair >> 8, true);
        }
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
            uint32 a[4];
            tile_fragment<Side::kLeft, true>(a, stage, warp_row() + m * 16, step);
            const Factor rows[2] = {Factor::of(row_scales[m * 16], false),
                                    Factor::of(row_scales[m * 16 + 8], false)};
#pragma unroll
            for (int n = 0; n < kFragmentsN; ++n) {
                constexpr float kZero[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                float block[4];
                mma_m16n8k32_e4m3(block, a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1], kZero);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& sum = accumulators[m][n][i];
                    sum = Factor::add_scaled(sum, block[i], rows[i / 2], columns[n][i % 2]);
                }
            }
        }
        row_scales += kBlockM + kBlockN;
        column_scales += kBlockM + kBlockN;
    }
}

// accumulators = the tile of a · b that begins at (row, column). `shared` has kSharedBytes, 16-byte
// aligned, and is free again when this returns. a.depth == b.depth.
template <bool kVector>
__device__ __forceinline__ void product(Accumulators& accumulators, const Operand& a,
                                        const Operand& b, int32 row, int32 column,
                                        unsigned char* shared) {
    using Copy = TileCopy<uint8, true, kVector, kThreads>;
    const Copy copy_a(TileOperand<uint8>{a.codes, a.depth, a.outer, a.depth}, row);
    const Copy copy_b(TileOperand<uint8>{b.codes, b.depth, b.outer, b.depth}, column);
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

    // In a stage the scales lie by step, those of a's rows first.
    const auto put_scales = [&](int32 stage, uint32 word) {
        unsigned char* scales_of_stage = shared + stage * kStageBytes + 2 * kTileBytes;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            scales_of_stage[i * (kBlockM + kBlockN) + threadIdx.x] = word >> (8 * i);
        }
    };
    const int32 tiles = (a.depth + kBlockK - 1) / kBlockK;
    // Bit s: this thread's row has wide scales in the tile of stage s.
    uint32 wide = 0;
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        if (stage < tiles) {
            copy_a.start(shared + stage * kStageBytes, stage * kBlockK);
            copy_b.start(shared + stage * kStageBytes + kTileBytes, stage * kBlockK);
            const uint32 word = scales.fetch(stage);
            put_scales(stage, word);
            wide |= static_cast<uint32>(is_wide(word)) << stage;
        }
        cp_async_commit();
    }

    int32 read_stage = 0;
    int32 write_stage = kStages - 1;
    for (int32 tile = 0; tile < tiles; ++tile) {
        // The tile is there for all threads, and all are done with the stage to be written.
        cp_async_wait<kStages - 2>();
        const bool any_wide = __syncthreads_or(wide >> read_stage & 1);
        const int32 next = tile + kStages - 1;
        uint32 word = 0;
        if (next < tiles) {
            unsigned char* stage = shared + write_stage * kStageBytes;
            copy_a.start(stage, next * kBlockK);
            copy_b.start(stage + kTileBytes, next * kBlockK);
            word = scales.fetch(next);
        }
        cp_async_commit();

        const unsigned char* stage = shared + read_stage * kStageBytes;
        if (any_wide) {
            multiply<WideFactor>(accumulators, stage);
        } else {
            multiply<NarrowFactor>(accumulators, stage);
        }

        if (next < tiles) {
            put_scales(write_stage, word);
            const uint32 bit = 1u << write_stage;
            wide = is_wide(word) ? wide | bit : wide & ~bit;
        }
        read_stage = read_stage + 1 == kStages ? 0 : read_stage + 1;
        write_stage = write_stage + 1 == kStages ? 0 : write_stage + 1;
    }
    cp_async_wait<0>();
    __syncthreads();
}

}  // namespace mxfp8_tile
