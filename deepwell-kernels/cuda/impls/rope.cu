// Rotary position embedding and its backward, BF16, in the half-split convention: element `i` of
// a head turns with element `i + half`, half = head_dim / 2.
//
// x, y [rows, heads * 2 * half]; row t stands at position t mod seq. A block takes `tile_rows`
// rows at a time: it first makes the sine and cosine of each (row, pair) in shared memory, once
// for all heads, then turns all heads. The angle is rounded to FP32, as models were trained with;
// `sincosf` reduces it exactly, so that late positions are as good as early ones.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;
// Sines of one tile: tile_rows * half is at most this.
constexpr int kTablePairs = 2048;

struct RopeArguments {
    const bf16* x;
    const float* inverse_frequencies;  // [half]
    bf16* y;
    uint64 rows;
    uint64 seq;
    uint32 heads;
    uint32 half;
    uint32 tile_rows;
    float cosine_factor;
    float sine_factor;  // of the other sign for the backward
};

struct Table {
    float cosines[kTablePairs];
    float sines[kTablePairs];
};

__device__ __forceinline__ void fill_table(Table& table, const RopeArguments& a, uint64 first_row,
                                           uint32 count) {
    for (uint32 i = threadIdx.x; i < count * a.half; i += kThreads) {
        const uint32 row = i / a.half;
        const uint64 position = (first_row + row) % a.seq;
        const float angle =
            __fmul_rn(static_cast<float>(position), a.inverse_frequencies[i - row * a.half]);
        float sine, cosine;
        sincosf(angle, &sine, &cosine);
        table.cosines[i] = cosine * a.cosine_factor;
        table.sines[i] = sine * a.sine_factor;
    }
}

// Turns the eight pairs (x[offset + j], x[offset + half + j]).
__device__ __forceinline__ void turn_vector(const Table& table, const RopeArguments& a,
                                            uint64 offset, uint32 pair) {
    float low[kWidth], high[kWidth], cosines[kWidth], sines[kWidth];
    unpack_bf16x8(*reinterpret_cast<const uint4*>(a.x + offset), low);
    unpack_bf16x8(*reinterpret_cast<const uint4*>(a.x + offset + a.half), high);
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
        *reinterpret_cast<float4*>(cosines + j) =
            *reinterpret_cast<const float4*>(table.cosines + pair + j);
        *reinterpret_cast<float4*>(sines + j) =
            *reinterpret_cast<const float4*>(table.sines + pair + j);
    }
    float turned_low[kWidth], turned_high[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        turned_low[j] = low[j] * cosines[j] - high[j] * sines[j];
        turned_high[j] = high[j] * cosines[j] + low[j] * sines[j];
    }
    *reinterpret_cast<uint4*>(a.y + offset) = pack_bf16x8(turned_low);
    *reinterpret_cast<uint4*>(a.y + offset + a.half) = pack_bf16x8(turned_high);
}

__device__ __forceinline__ void turn_scalar(const Table& table, const RopeArguments& a,
                                            uint64 offset, uint32 pair) {
    const float low = to_f32(a.x[offset]);
    const float high = to_f32(a.x[offset + a.half]);
    const float cosine = table.cosines[pair];
    const float sine = table.sines[pair];
    a.y[offset] = to_bf16(low * cosine - high * sine);
    a.y[offset + a.half] = to_bf16(high * cosine + low * sine);
}

template <bool kVector>
__device__ __forceinline__ void rope(const RopeArguments& a) {
    __shared__ alignas(16) Table table;
    constexpr uint32 kStep = kVector ? kWidth : 1;
    const uint32 units = a.half / kStep;
    const uint64 row_elements = static_cast<uint64>(a.heads) * a.half * 2;
    const uint64 tiles = (a.rows + a.tile_rows - 1) / a.tile_rows;
    for (uint64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const uint64 first_row = tile * a.tile_rows;
        const uint64 left = a.rows - first_row;
        const uint32 count = left < a.tile_rows ? static_cast<uint32>(left) : a.tile_rows;
        fill_table(table, a, first_row, count);
        __syncthreads();
        // The pairs of a tile, in the order in which they lie.
        const uint32 items = count * a.heads * units;
        for (uint32 item = threadIdx.x; item < items; item += kThreads) {
            const uint32 head = item / units;  // counted over all rows of the tile
            const uint32 unit = (item - head * units) * kStep;
            const uint32 row = head / a.heads;
            const uint64 offset = first_row * row_elements +
                                  static_cast<uint64>(head) * (2 * a.half) + unit;
            if (kVector) {
                turn_vector(table, a, offset, row * a.half + unit);
            } else {
                turn_scalar(table, a, offset, row * a.half + unit);
            }
        }
        __syncthreads();
    }
}

// half is a multiple of 8; x, y 16-byte aligned.
extern "C" __global__ void __launch_bounds__(kThreads)
    rope_vector(const bf16* __restrict__ x, const float* __restrict__ inverse_frequencies,
                bf16* __restrict__ y, uint64 rows, uint64 seq, uint32 heads, uint32 half,
                uint32 tile_rows, float cosine_factor, float sine_factor) {
    rope<true>(RopeArguments{x, inverse_frequencies, y, rows, seq, heads, half, tile_rows,
                             cosine_factor, sine_factor});
}

// Any half.
extern "C" __global__ void __launch_bounds__(kThreads)
    rope_scalar(const bf16* __restrict__ x, const float* __restrict__ inverse_frequencies,
                bf16* __restrict__ y, uint64 rows, uint64 seq, uint32 heads, uint32 half,
                uint32 tile_rows, float cosine_factor, float sine_factor) {
    rope<false>(RopeArguments{x, inverse_frequencies, y, rows, seq, heads, half, tile_rows,
                              cosine_factor, sine_factor});
}
