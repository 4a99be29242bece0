// Splits FP32 matrices into BF16 parts, for GEMMs of FP32 accuracy by a library, and sums the
// results: mma/split_tile.cuh defines the parts.
//
//   router_parts_split  slots [slot][r, c] = the slot's part of x [R, C], in BF16
//   router_parts_sum    out [R, C] (+)= sum of slots [slot][r, c] in their order (+ bias [C])
//
// Slots are `slot_stride` elements apart and their rows `row_stride`, so that slots may be stacked
// or side by side. A thread processes eight elements of a row at a time; columns are a multiple of
// 8.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;
constexpr int kParts = 3;

__device__ __forceinline__ void load_eight(const float* from, float (&values)[kWidth]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 four = reinterpret_cast<const float4*>(from)[half];
        values[4 * half] = four.x;
        values[4 * half + 1] = four.y;
        values[4 * half + 2] = four.z;
        values[4 * half + 3] = four.w;
    }
}

// Bits 4 s to 4 s + 3 of `parts` select the part in slot s: 0 is the largest.
extern "C" __global__ void __launch_bounds__(kThreads)
    router_parts_split(const float* __restrict__ x, bf16* __restrict__ slots, uint32 rows,
                       uint32 columns, uint64 slot_stride, uint64 row_stride, uint32 count,
                       uint32 parts) {
    const uint32 across = columns / kWidth;
    const uint64 vectors = static_cast<uint64>(rows) * across;
    const uint64 grid = static_cast<uint64>(gridDim.x) * kThreads;
    for (uint64 i = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
         i += grid) {
        const uint64 row = i / across, column = i % across * kWidth;
        float left[kWidth];
        load_eight(x + i * kWidth, left);
        uint4 of_parts[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            of_parts[part] = pack_bf16x8(left);
            float taken[kWidth];
            unpack_bf16x8(of_parts[part], taken);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                left[j] -= taken[j];
            }
        }
        bf16* const to = slots + row * row_stride + column;
        for (uint32 slot = 0; slot < count; ++slot) {
            const uint32 part = parts >> 4 * slot & 0xf;
            *reinterpret_cast<uint4*>(to + slot * slot_stride) =
                part == 0 ? of_parts[0] : part == 1 ? of_parts[1] : of_parts[2];
        }
    }
}

// bias [columns] or null.
extern "C" __global__ void __launch_bounds__(kThreads)
    router_parts_sum(const float* __restrict__ slots, const float* __restrict__ bias, float* out,
                     uint32 rows, uint32 columns, uint64 slot_stride, uint64 row_stride,
                     uint32 count, uint32 accumulate) {
    const uint32 across = columns / kWidth;
    const uint64 vectors = static_cast<uint64>(rows) * across;
    const uint64 grid = static_cast<uint64>(gridDim.x) * kThreads;
    for (uint64 i = static_cast<uint64>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
         i += grid) {
        const uint64 row = i / across, column = i % across * kWidth;
        float sum[kWidth] = {};
        const auto add = [&](const float* from) {
            float values[kWidth];
            load_eight(from, values);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                sum[j] += values[j];
            }
        };
        for (uint32 slot = 0; slot < count; ++slot) {
            add(slots + slot * slot_stride + row * row_stride + column);
        }
        if (bias != nullptr) {
            add(bias + column);
        }
        float* const to = out + i * kWidth;
        if (accumulate) {
            add(to);
        }
        reinterpret_cast<float4*>(to)[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
}
