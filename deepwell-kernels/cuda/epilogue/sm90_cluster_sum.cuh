// From sums of wgmma in the registers of the CTAs of a cluster, each of a part of K, to the result:
// every CTA puts its sums into its shared memory, and then adds those of all for a part of the rows,
// in the order of the parts.
#pragma once

#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "ptx/cluster.cuh"

// Rows of sums in shared memory are this many FP32 apart: padded so that the eight rows that a warp
// writes at once begin in different banks.
template <int kColumns>
constexpr uint32 kSummedRow = kColumns + 8;

// Puts a warp's 16 rows of a slice of 2 kValues columns into `target`, the first of them; `sums` as
// ptx/wgmma.cuh has them.
template <int kColumns, int kValues>
__device__ __forceinline__ void put_summed_rows(float* target, const float (&sums)[kValues]) {
    const uint32 lane = threadIdx.x % 32;
    float* row = target + lane / 4 * kSummedRow<kColumns> + lane % 4 * 2;
#pragma unroll
    for (int eight = 0; eight < kValues / 4; ++eight) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* pair = sums + eight * 4 + half * 2;
            *reinterpret_cast<float2*>(row + half * 8 * kSummedRow<kColumns> + eight * 8) =
                make_float2(pair[0], pair[1]);
        }
    }
}

// Four neighbors of a row of the result, where they are within it.
template <typename Element>
__device__ __forceinline__ void put_result(const TileResult<Element>& result, int32 row,
                                           int32 column, float4 sum) {
    if (row >= result.rows || column >= result.columns) {
        return;
    }
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    Element* target = result.data + static_cast<int64>(row) * result.columns + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (column + i < result.columns) {
            if (result.bias != nullptr) {
                values[i] += to_f32(result.bias[column + i]);
            }
            if constexpr (sizeof(Element) == 4) {
                if (result.accumulate) {
                    values[i] += target[i];
                }
            }
        }
    }
    if (result.columns % 4 == 0) {
        if constexpr (sizeof(Element) == 4) {
            *reinterpret_cast<float4*>(target) =
                make_float4(values[0], values[1], values[2], values[3]);
        } else {
            *reinterpret_cast<uint2*>(target) = make_uint2(to_bf16_pair(values[0], values[1]),
                                                           to_bf16_pair(values[2], values[3]));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (column + i < result.columns) {
                if constexpr (sizeof(Element) == 4) {
                    target[i] = values[i];
                } else {
                    target[i] = to_bf16(values[i]);
                }
            }
        }
    }
}

// Adds the sums of all CTAs of a cluster of `kParts`, each with `kRows` rows in `summed`, for the
// rows that are this CTA's, by `threads` threads of which the caller is `thread`. A barrier of the
// cluster lies before, and one behind: others read what is here.
template <typename Element, int kRows, int kColumns, int kParts>
__device__ __forceinline__ void store_cluster_sum(const TileResult<Element>& result, uint32 row,
                                                  uint32 column, const float* summed,
                                                  uint32 thread, uint32 threads) {
    constexpr uint32 kOwnRows = kRows / kParts;
    constexpr uint32 kQuads = kColumns / 4;
    static_assert(kRows % kParts == 0, "as many rows for each CTA");
    const uint32 first = cluster_rank() * kOwnRows;
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(summed));
    for (uint32 i = thread; i < kOwnRows * kQuads; i += threads) {
        const uint32 r = first + i / kQuads;
        const uint32 c = i % kQuads * 4;
        const uint32 at = address + (r * kSummedRow<kColumns> + c) * 4;
        float4 sum = load_cluster_f32x4(cluster_address(at, 0));
#pragma unroll
        for (uint32 part = 1; part < kParts; ++part) {
            const float4 other = load_cluster_f32x4(cluster_address(at, part));
            sum = make_float4(sum.x + other.x, sum.y + other.y, sum.z + other.z,
                              sum.w + other.w);
        }
        put_result(result, static_cast<int32>(row + r), static_cast<int32>(column + c), sum);
    }
}
