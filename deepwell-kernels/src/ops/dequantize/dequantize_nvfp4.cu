// Dequantizes an NVFP4 operand to BF16 or FP32: element times block scale, exact, times the tensor
// scale in FP32; a transform is undone before the rounding to BF16. A columnwise operand is stored
// transposed and transposed back. A thread has a block of 16 elements.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_block.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr uint32 kScaleElements = 64;  // elements along K of a tile of scales

__device__ __forceinline__ void store(float* target, float value) {
    *target = value;
}

// A finite number beyond the largest BF16 becomes the largest BF16.
__device__ __forceinline__ void store(bf16* target, float value) {
    constexpr uint32 kBf16MaxBits = 0x7f7f0000u;
    const uint32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    const bool is_beyond = magnitude > kBf16MaxBits && magnitude < kInfinityBits;
    *target = to_bf16(is_beyond ? __uint_as_float((bits & 0x80000000u) | kBf16MaxBits) : value);
}

template <typename E, bool kColumn>
__device__ __forceinline__ void dequantize(const uint8* __restrict__ data,
                                           const uint8* __restrict__ scales,
                                           const float* __restrict__ tensor_scale,
                                           E* __restrict__ target, uint32 outer, uint32 k,
                                           uint32 flags) {
    const uint32 blocks = (k + kFp4Block - 1) / kFp4Block;
    const uint32 tiles_along = (k + kScaleElements - 1) / kScaleElements;
    const uint64 count = static_cast<uint64>(outer) * blocks;
    for (uint64 at = blockIdx.x * static_cast<uint64>(kThreads) + threadIdx.x; at < count;
         at += gridDim.x * static_cast<uint64>(kThreads)) {
        // Neighboring threads write neighboring elements of a row of the target.
        const uint32 row = static_cast<uint32>(kColumn ? at % outer : at / blocks);
        const uint32 block = static_cast<uint32>(kColumn ? at / outer : at % blocks);
        const uint64 tile = static_cast<uint64>(row / kScaleTileRows) * tiles_along + block / 4;
        const float scale = ue4m3_to_f32(
            scales[tile * kScaleTileBytes + scale_row_place(row % kScaleTileRows) + block % 4]);
        const uint32 first = block * kFp4Block, exist = min(k - first, kFp4Block);
        const uint8* const from = data + static_cast<uint64>(row) * ((k + 1) / 2) + first / 2;
        float x[kFp4Block];
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            const uint32 code = i < exist ? from[i / 2] >> (i % 2 * 4) : 0;
            const float element = __uint_as_float(__float_as_uint(fp4_magnitude(code & 7)) |
                                                  (code >> 3 & 1) << 31);
            x[i] = __fmul_rn(element * scale, *tensor_scale);
        }
        if (flags & kFp4Hadamard) {
            fp4_butterfly(x);
            fp4_change_signs(x, flags);
        }
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            if (i < exist) {
                store(target + (kColumn ? static_cast<uint64>(first + i) * outer + row
                                        : static_cast<uint64>(row) * k + first + i),
                      x[i]);
            }
        }
    }
}

// data [outer, k] packed; scales in tiles; tensor_scale [1]; target [outer, k], of a columnwise
// operand [k, outer]; flags of `layout/nvfp4_block.cuh`.
#define DEQUANTIZE_KERNEL(name, E, column)                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const uint8* __restrict__ data, const uint8* __restrict__ scales,                   \
             const float* __restrict__ tensor_scale, E* __restrict__ target, uint32 outer,       \
             uint32 k, uint32 flags) {                                                           \
        dequantize<E, column>(data, scales, tensor_scale, target, outer, k, flags);              \
    }

DEQUANTIZE_KERNEL(dequantize_nvfp4_bf16_row, bf16, false)
DEQUANTIZE_KERNEL(dequantize_nvfp4_bf16_column, bf16, true)
DEQUANTIZE_KERNEL(dequantize_nvfp4_f32_row, float, false)
DEQUANTIZE_KERNEL(dequantize_nvfp4_f32_column, float, true)
