// Rotary position embedding and its backward, BF16, in the half-split convention: element `i` of a
// head is rotated with element `i + half`, half = head_dim / 2.
//
// x, y [rows, heads, 2, half]; table [positions, 2, half] FP32, cosines then sines, computed by the
// host in FP64; row t has the position t mod positions. The backward is the rotation by the
// opposite angle: `direction` is 1 or -1. The arithmetic is that of the CPU, product by product.
//
// A thread has one unit of pairs (eight, or one if half is not a multiple of eight) of up to four
// heads of one row: it reads the unit's sines once, and loads the heads' elements together.
// Neighbouring threads have neighbouring units, then heads, then rows, so that a warp reads whole
// sectors and the sines of a row come from the L1 cache for all heads except the first.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 256;
constexpr int kWidth = 8;
constexpr int kHeads = 4;

struct Turned {
    float low;
    float high;
};

// Multiplication and addition are not fused, as on the CPU.
__device__ __forceinline__ Turned turn(float low, float high, float cosine, float sine) {
    return Turned{__fsub_rn(__fmul_rn(low, cosine), __fmul_rn(high, sine)),
                  __fadd_rn(__fmul_rn(high, cosine), __fmul_rn(low, sine))};
}

// A thread's heads: the first, and every `head_step`-th head from there.
struct Place {
    uint64 offset;    // offset of the unit in the first head, in elements of x
    uint64 in_table;  // offset of the unit's cosines
    uint32 head;
};

// `units` per head, `head_step` threads per unit of a row.
__device__ __forceinline__ Place place_of(uint32 item, uint32 positions, uint32 heads, uint32 half,
                                          uint32 units, uint32 head_step) {
    const uint32 width = half / units;
    const uint32 of_heads = item / units;
    const uint32 unit = item - of_heads * units;
    const uint32 row = of_heads / head_step;
    Place place;
    place.head = of_heads - row * head_step;
    place.offset = (static_cast<uint64>(row) * heads + place.head) * (2 * half) + unit * width;
    place.in_table = static_cast<uint64>(row % positions) * (2 * half) + unit * width;
    return place;
}

// half is a multiple of 8; x, y, table 16-byte aligned. One thread for each of `items` units.
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    rope_vector(const bf16* __restrict__ x, const float* __restrict__ table, bf16* __restrict__ y,
                uint32 items, uint32 positions, uint32 heads, uint32 half, uint32 head_step,
                float direction) {
    const uint32 item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) {
        return;
    }
    const Place place = place_of(item, positions, heads, half, half / kWidth, head_step);
    const uint64 step = static_cast<uint64>(head_step) * (2 * half);
    uint4 low[kHeads], high[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (place.head + k * head_step < heads) {
            const bf16* const source = x + place.offset + k * step;
            low[k] = *reinterpret_cast<const uint4*>(source);
            high[k] = *reinterpret_cast<const uint4*>(source + half);
        }
    }
    float cosines[kWidth], sines[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
        const float* const source = table + place.in_table + j;
        const float4 c = *reinterpret_cast<const float4*>(source);
        const float4 s = *reinterpret_cast<const float4*>(source + half);
        cosines[j] = c.x, cosines[j + 1] = c.y, cosines[j + 2] = c.z, cosines[j + 3] = c.w;
        sines[j] = s.x, sines[j + 1] = s.y, sines[j + 2] = s.z, sines[j + 3] = s.w;
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        sines[j] *= direction;
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (place.head + k * head_step < heads) {
            float a[kWidth], b[kWidth];
            unpack_bf16x8(low[k], a);
            unpack_bf16x8(high[k], b);
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                const Turned turned = turn(a[j], b[j], cosines[j], sines[j]);
                a[j] = turned.low;
                b[j] = turned.high;
            }
            bf16* const target = y + place.offset + k * step;
            *reinterpret_cast<uint4*>(target) = pack_bf16x8(a);
            *reinterpret_cast<uint4*>(target + half) = pack_bf16x8(b);
        }
    }
}

// For any half. One thread for each of `items` pairs.
extern "C" __global__ void __launch_bounds__(kThreads)
    rope_scalar(const bf16* __restrict__ x, const float* __restrict__ table, bf16* __restrict__ y,
                uint32 items, uint32 positions, uint32 heads, uint32 half, uint32 head_step,
                float direction) {
    const uint32 item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= items) {
        return;
    }
    const Place place = place_of(item, positions, heads, half, half, head_step);
    const uint64 step = static_cast<uint64>(head_step) * (2 * half);
    const float cosine = table[place.in_table];
    const float sine = table[place.in_table + half] * direction;
    bf16 low[kHeads], high[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (place.head + k * head_step < heads) {
            low[k] = x[place.offset + k * step];
            high[k] = x[place.offset + k * step + half];
        }
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (place.head + k * head_step < heads) {
            const Turned turned = turn(to_f32(low[k]), to_f32(high[k]), cosine, sine);
            y[place.offset + k * step] = to_bf16(turned.low);
            y[place.offset + k * step + half] = to_bf16(turned.high);
        }
    }
}
