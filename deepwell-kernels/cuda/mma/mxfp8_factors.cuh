// Steps of an MXFP8 GEMM (mma/mxfp8_tile.cuh) on tensor cores without block scales.
//
// Each step of 32 along K is one MMA from zero accumulators. Its result is multiplied by 2^(sa +
// sb), the scales of row and column, and added in FP32.
//
// The factor 2^(sa + sb) may exceed the range of FP32 even if the scaled product does not. If all
// scales of a tile lie between 2^-63 and 2^63, the factor is in range and takes one multiplication
// per element. Otherwise each scale is split into two roots, and the two halves of the factor are
// applied in sequence.
#pragma once

#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/operand_tile.cuh"
#include "mma/mxfp8_tile.cuh"
#include "ptx/mma_sync.cuh"

namespace mxfp8_tile {

// Whether any of four scales lies outside 2^-63 to 2^63.
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

// A scale of any size, as two factors near its root. Rows round the exponent of the first factor
// down and columns round it up, so that the products of firsts and of seconds stay within 2^-127 to
// 2^127.
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

// In a stage the scales are ordered by step; those of a's rows come first.
class FactorSteps : public WordStages {
    uint32 wide_ = 0;  // bit s: this thread's row has wide scales in the tile of stage s
    bool any_wide_ = false;

  public:
    __device__ __forceinline__ void put_scales(unsigned char* stage, int32 number, uint32 word) {
        unsigned char* scales = stage + 2 * kTileBytes;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            scales[i * (kBlockM + kBlockN) + threadIdx.x] = word >> (8 * i);
        }
        const uint32 bit = 1u << number;
        wide_ = is_wide(word) ? wide_ | bit : wide_ & ~bit;
    }

    __device__ __forceinline__ void meet(int32 number) {
        any_wide_ = __syncthreads_or(wide_ >> number & 1);
    }

    __device__ __forceinline__ void multiply(Accumulators& accumulators,
                                             const unsigned char* stage) const {
        if (any_wide_) {
            multiply_with<WideFactor>(accumulators, stage);
        } else {
            multiply_with<NarrowFactor>(accumulators, stage);
        }
    }

  private:
    template <typename Factor>
    static __device__ __forceinline__ void multiply_with(Accumulators& accumulators,
                                                         const unsigned char* stage) {
        const int32 lane = threadIdx.x % 32;
        const unsigned char* row_scales = stage + 2 * kTileBytes + warp_row() + lane / 4;
        const unsigned char* column_scales =
            stage + 2 * kTileBytes + kBlockM + warp_column() + lane % 4 * 2;
        // Not unrolled: the fragments of all steps would exceed the registers.
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
                    mma_m16n8k32_e4m3(block, a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1],
                                      kZero);
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
};

}  // namespace mxfp8_tile
