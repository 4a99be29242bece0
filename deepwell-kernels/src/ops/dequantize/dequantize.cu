// Quantized data and scales of one operand back to BF16 or FP32: E4M3 times a power of two, exact
// in FP32 and rounded to nearest even for BF16. A rowwise operand keeps its layout; a columnwise
// operand is stored transposed and is transposed back. The kernel serves ablations, where time
// matters little.
//
// A CTA has a tile of 64 x 64 elements. A thread decodes 16 elements of a row, which share one
// scale, into shared memory; the CTA then writes the result in whole lines.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/e8m0.cuh"
#include "layout/mx_value.cuh"
#include "layout/scale_tile.cuh"

constexpr int kThreads = 256;
constexpr uint32 kTile = 64;
constexpr uint32 kVector = 16;                // elements per thread
constexpr uint32 kVectors = kTile / kVector;   // per row of a tile
constexpr uint32 kScaleElements = 32;        // elements per scale

static_assert(kThreads == kTile * kVectors);

__device__ __forceinline__ void store(bf16* place, float value) {
    *place = to_bf16(value);
}

__device__ __forceinline__ void store(float* place, float value) {
    *place = value;
}

// Loads the data of row `row` from `first` on, with zeros beyond the row's end.
__device__ __forceinline__ void load_vector(const uint8* __restrict__ data, uint32 row,
                                            uint32 first, uint32 k, uint32 (&words)[kVector / 4]) {
    const uint8* const row_data = data + static_cast<uint64>(row) * k + first;
    if (k % kVector == 0) {
        const uint4 found = *reinterpret_cast<const uint4*>(row_data);
        words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
        return;
    }
#pragma unroll
    for (uint32 i = 0; i < kVector; ++i) {
        const uint32 code = first + i < k ? row_data[i] : 0;
        words[i / 4] = (i % 4 == 0 ? 0 : words[i / 4]) | code << (i % 4 * 8);
    }
}

template <typename E, bool kColumn>
__device__ __forceinline__ void dequantize(const uint8* __restrict__ data,
                                           const uint8* __restrict__ scales,
                                           E* __restrict__ target, uint32 rows, uint32 k) {
    // One column more than the tile, so that the elements of a column are in different banks.
    __shared__ float tile[kTile][kTile + 1];
    // An empty matrix has one CTA.
    const uint32 across = k == 0 ? 1 : (k + kTile - 1) / kTile;
    const uint32 row0 = blockIdx.x / across * kTile, first0 = blockIdx.x % across * kTile;
    const uint32 of_tile = threadIdx.x / kVectors, vector = threadIdx.x % kVectors * kVector;
    const uint32 row = row0 + of_tile, first = first0 + vector;
    if (row < rows && first < k) {
        uint32 words[kVector / 4];
        load_vector(data, row, first, k, words);
        const uint64 place = scale_tile_place(row, first, k) +
                             scale_row_place(row % kScaleTileRows) +
                             first % kScaleTileElements / kScaleElements;
        const float scale = e8m0_to_f32(scales[place]);
#pragma unroll
        for (uint32 i = 0; i < kVector; ++i) {
            const uint32 code = words[i / 4] >> (i % 4 * 8) & 0xff;
            tile[of_tile][vector + i] = e4m3_to_f32(code) * scale;
        }
    }
    __syncthreads();
    for (uint32 i = threadIdx.x; i < kTile * kTile; i += kThreads) {
        const uint32 major = i / kTile, minor = i % kTile;
        const uint32 down = kColumn ? minor : major, along = kColumn ? major : minor;
        if (row0 + down < rows && first0 + along < k) {
            const uint64 at = kColumn ? static_cast<uint64>(first0 + along) * rows + row0 + down
                                      : static_cast<uint64>(row0 + down) * k + first0 + along;
            store(target + at, tile[down][along]);
        }
    }
}

// data [rows, k], 16-byte aligned; scales in tiles; target [rows, k] for a rowwise operand and [k,
// rows] for a columnwise operand. One CTA per tile.
#define DEQUANTIZE_KERNEL(name, E, column)                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const uint8* __restrict__ data, const uint8* __restrict__ scales,                   \
             E* __restrict__ target, uint32 rows, uint32 k) {                                    \
        dequantize<E, column>(data, scales, target, rows, k);                                    \
    }

DEQUANTIZE_KERNEL(dequantize_bf16_row, bf16, false)
DEQUANTIZE_KERNEL(dequantize_bf16_column, bf16, true)
DEQUANTIZE_KERNEL(dequantize_f32_row, float, false)
DEQUANTIZE_KERNEL(dequantize_f32_column, float, true)
