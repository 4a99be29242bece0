// The error of a quantized GEMM on one tile of its output, 128 x 128: the sum of squares of the
// product of samples of the unquantized operands, and of the difference between the product of the
// quantized operands and this product. Products accumulate in FP32 along the contraction, sums in
// FP64 in a fixed order. The tile of a grouped GEMM is that of one group
// (layout/sampled_group.cuh).
//
// A CTA has 16 x 16 elements of the tile, each thread one. The contraction goes through shared
// memory in steps of 64 elements.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/sum_f64.cuh"
#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/nvfp4_block.cuh"
#include "layout/sampled_group.cuh"
#include "layout/scale_tile.cuh"

constexpr uint32 kRows = 128;     // of the tile
constexpr uint32 kSide = 16;      // of a CTA's part
constexpr uint32 kParts = kRows / kSide;
constexpr int kThreads = kSide * kSide;
constexpr int kWarps = kThreads / 32;
constexpr uint32 kStep = 64;
constexpr uint32 kStride = kStep + 1;  // rows begin in different banks

// A sample: element (row, along) at row * row_stride + along * along_stride.
struct Sample {
    const void* values;
    uint32 row_stride;
    uint32 along_stride;
    uint32 is_f32;
};

// A quantized operand [outer, k], from its row `first` and its element `first_along` of a row on:
// E2M1 with UE4M3 scales of 16 elements and a tensor scale, or E4M3 with E8M0 scales of 32.
struct Quantized {
    const uint8* data;
    const uint8* scales;
    const float* tensor_scale;  // null without one
    uint32 outer;
    uint32 k;
    uint32 first;
    uint32 first_along;
    uint32 end_along;

    __device__ __forceinline__ uint32 scale_tiles_across() const {
        const uint32 elements = 4 * (tensor_scale == nullptr ? 32 : kFp4Block);
        return (k + elements - 1) / elements;
    }

    // Narrows the operand to what a group has of it.
    __device__ __forceinline__ void narrow(const SampledGroup& group, Sampled part) {
        if (part == Sampled::kRows) {
            first = group.first_sampled();
            outer = group.end;
        } else if (part == Sampled::kAlong) {
            first_along = group.first;
            end_along = group.end;
        } else {
            const uint64 matrix = group.group;
            const uint32 down = (outer + kScaleTileRows - 1) / kScaleTileRows;
            data += matrix * outer * (tensor_scale == nullptr ? k : (k + 1) / 2);
            scales += matrix * down * scale_tiles_across() * kScaleTileBytes;
        }
        if (tensor_scale != nullptr) {
            tensor_scale += group.group;
        }
    }
};

struct Operand {
    Sample sample;
    Quantized quantized;
};

struct Tile {
    float samples[2][kSide * kStride];
    float quantized[2][kSide * kStride];
};

__device__ __forceinline__ float sampled(const Sample& sample, uint32 row, uint32 along) {
    const uint64 at = static_cast<uint64>(row) * sample.row_stride +
                      static_cast<uint64>(along) * sample.along_stride;
    return sample.is_f32 ? static_cast<const float*>(sample.values)[at]
                         : to_f32(static_cast<const bf16*>(sample.values)[at]);
}

__device__ __forceinline__ float e4m3_to_f32(uint32 code) {
    // Exponent and fraction at their places in FP32, and the difference of the biases.
    const float magnitude = __uint_as_float((code & 0x7fu) << 20) * 0x1p120f;
    const float value = (code & 0x7fu) == 0x7fu ? __uint_as_float(0x7fc00000u) : magnitude;
    return code & 0x80u ? -value : value;
}

__device__ __forceinline__ uint8 scale_at(const Quantized& from, uint32 outer, uint32 along,
                                          uint32 every) {
    const uint64 tile =
        static_cast<uint64>(outer / kScaleTileRows) * from.scale_tiles_across() +
        along / (4 * every);
    return from.scales[tile * kScaleTileBytes + scale_row_place(outer % kScaleTileRows) +
                       along / every % 4];
}

__device__ __forceinline__ float dequantized(const Quantized& from, uint32 row, uint32 place) {
    const uint32 outer = from.first + row, along = from.first_along + place;
    if (outer >= from.outer || along >= from.end_along) {
        return 0.0f;
    }
    if (from.tensor_scale == nullptr) {
        const uint32 code = from.data[static_cast<uint64>(outer) * from.k + along];
        return e4m3_to_f32(code) * e8m0_to_f32(scale_at(from, outer, along, 32));
    }
    const uint32 byte = from.data[static_cast<uint64>(outer) * ((from.k + 1) / 2) + along / 2];
    const uint32 code = byte >> (along % 2 * 4);
    const float magnitude = fp4_magnitude(code & 7);
    const float scale = ue4m3_to_f32(scale_at(from, outer, along, kFp4Block));
    return (code & 8 ? -magnitude : magnitude) * scale * *from.tensor_scale;
}

__device__ __forceinline__ void load(const Operand& operand, uint32 row0, uint32 first,
                                     uint32 depth, float* samples, float* quantized) {
    for (uint32 at = threadIdx.x; at < kSide * kStep; at += kThreads) {
        // Neighboring threads read neighboring elements.
        const bool is_transposed = operand.sample.row_stride == 1;
        const uint32 row = is_transposed ? at % kSide : at / kStep;
        const uint32 along = is_transposed ? at / kSide : at % kStep;
        const bool exists = first + along < depth;
        samples[row * kStride + along] =
            exists ? sampled(operand.sample, row0 + row, first + along) : 0.0f;
    }
    for (uint32 at = threadIdx.x; at < kSide * kStep; at += kThreads) {
        const uint32 row = at / kStep, along = at % kStep;
        const bool exists = first + along < depth;
        quantized[row * kStride + along] =
            exists ? dequantized(operand.quantized, row0 + row, first + along) : 0.0f;
    }
}

__device__ __forceinline__ void measure(const Operand& a, const Operand& b, uint32 depth,
                                        double* partials, uint32* arrivals, float* sums) {
    __shared__ Tile tile;
    const uint32 row0 = blockIdx.x / kParts * kSide, column0 = blockIdx.x % kParts * kSide;
    const uint32 row = threadIdx.x / kSide, column = threadIdx.x % kSide;
    float product = 0.0f, of_quantized = 0.0f;
    for (uint32 first = 0; first < depth; first += kStep) {
        __syncthreads();
        load(a, row0, first, depth, tile.samples[0], tile.quantized[0]);
        load(b, column0, first, depth, tile.samples[1], tile.quantized[1]);
        __syncthreads();
#pragma unroll 16
        for (uint32 along = 0; along < kStep; ++along) {
            product = fmaf(tile.samples[0][row * kStride + along],
                           tile.samples[1][column * kStride + along], product);
            of_quantized = fmaf(tile.quantized[0][row * kStride + along],
                                tile.quantized[1][column * kStride + along], of_quantized);
        }
    }
    const double signal = product, error = static_cast<double>(of_quantized) - product;
    const double signals = sum_over_cta<kWarps>(signal * signal);
    __syncthreads();
    const double errors = sum_over_cta<kWarps>(error * error);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = signals;
        partials[gridDim.x + blockIdx.x] = errors;
    }
    if (is_last_cta(arrivals, gridDim.x) && threadIdx.x < 2) {
        double sum = 0.0;
        for (uint32 cta = 0; cta < gridDim.x; ++cta) {
            sum += __ldcg(partials + threadIdx.x * gridDim.x + cta);
        }
        sums[threadIdx.x] = static_cast<float>(sum);
    }
}

// Samples and quantized operands of a and b; offsets [groups + 1] of a grouped GEMM, and what a
// group has of each operand; `depth` elements of the contraction; partials [2, 64]; arrivals [1],
// zero before and after the launch; sums [2]. 64 CTAs.
extern "C" __global__ void __launch_bounds__(kThreads)
    product_error(const void* a, uint32 a_row_stride, uint32 a_along_stride, uint32 a_is_f32,
                  const uint8* a_data, const uint8* a_scales, const float* a_tensor_scale,
                  uint32 a_outer, uint32 a_k, uint32 a_first, uint32 a_part, const void* b,
                  uint32 b_row_stride, uint32 b_along_stride, uint32 b_is_f32,
                  const uint8* b_data, const uint8* b_scales, const float* b_tensor_scale,
                  uint32 b_outer, uint32 b_k, uint32 b_first, uint32 b_part,
                  const int32* __restrict__ offsets, uint32 groups, uint32 depth, double* partials,
                  uint32* arrivals, float* sums) {
    Operand of_a = {{a, a_row_stride, a_along_stride, a_is_f32},
                    {a_data, a_scales, a_tensor_scale, a_outer, a_k, a_first, 0, a_k}};
    Operand of_b = {{b, b_row_stride, b_along_stride, b_is_f32},
                    {b_data, b_scales, b_tensor_scale, b_outer, b_k, b_first, 0, b_k}};
    if (groups > 0) {
        const SampledGroup group = sampled_group(offsets, groups);
        of_a.quantized.narrow(group, static_cast<Sampled>(a_part));
        of_b.quantized.narrow(group, static_cast<Sampled>(b_part));
    }
    measure(of_a, of_b, depth, partials, arrivals, sums);
}
