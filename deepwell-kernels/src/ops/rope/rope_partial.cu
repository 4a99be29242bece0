// Rotary position embedding of a head's last elements, and its backward, BF16: the first `plain`
// elements of a head are copied, and the `2 half` elements after these are rotated in pairs, either
// of neighbors (`_interleaved`: DeepSeek-V3) or of elements `half` apart.
//
// x, y [rows, heads, plain + 2 half]; table [positions, 2, half] FP32, cosines then sines, computed
// by the host in FP64; row t has the position t mod positions. The backward is the rotation by the
// opposite angle: `direction` is 1 or -1. The arithmetic is that of the CPU, product by product.
// Roofline: 4 rows heads (plain + 2 half) bytes at memcpy bandwidth.
//
// A thread has one unit of up to four heads of one row. A unit is 16 copied bytes, 16 bytes of four
// pairs of neighbors, or twice 16 bytes of eight pairs; in `_scalar` kernels a single element
// or pair.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16_unit.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
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

struct Arguments {
    const bf16* __restrict__ x;
    const float* __restrict__ table;
    bf16* __restrict__ y;
    uint32 items;
    uint32 positions;
    uint32 heads;
    uint32 plain;
    uint32 half;
    uint32 head_step;  // threads per unit of a row, which share the heads
    float direction;
};

// Copies a unit of a thread's heads: the first, and every `head_step`-th head from there.
template <bool kVector>
__device__ __forceinline__ void copy(const Arguments& a, uint64 offset, uint32 head) {
    using Bits = typename Bf16Unit<kVector>::Bits;
    const uint64 step = static_cast<uint64>(a.head_step) * (a.plain + 2 * a.half);
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (head + k * a.head_step < a.heads) {
            *reinterpret_cast<Bits*>(a.y + offset + k * step) =
                *reinterpret_cast<const Bits*>(a.x + offset + k * step);
        }
    }
}

// Rotates pairs of neighbors: two elements, or eight.
template <bool kVector>
__device__ __forceinline__ void turn_neighbors(const Arguments& a, uint64 offset, uint64 in_table,
                                               uint32 head) {
    constexpr int kPairs = kVector ? 4 : 1;
    const uint64 step = static_cast<uint64>(a.head_step) * (a.plain + 2 * a.half);
    float cosines[kPairs], sines[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        cosines[i] = a.table[in_table + i];
        sines[i] = a.table[in_table + a.half + i] * a.direction;
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (head + k * a.head_step < a.heads) {
            const bf16* const source = a.x + offset + k * step;
            bf16* const target = a.y + offset + k * step;
            float values[2 * kPairs];
            if constexpr (kVector) {
                unpack_bf16x8(*reinterpret_cast<const uint4*>(source), values);
            } else {
                values[0] = to_f32(source[0]);
                values[1] = to_f32(source[1]);
            }
#pragma unroll
            for (int i = 0; i < kPairs; ++i) {
                const Turned turned =
                    turn(values[2 * i], values[2 * i + 1], cosines[i], sines[i]);
                values[2 * i] = turned.low;
                values[2 * i + 1] = turned.high;
            }
            if constexpr (kVector) {
                *reinterpret_cast<uint4*>(target) = pack_bf16x8(values);
            } else {
                target[0] = to_bf16(values[0]);
                target[1] = to_bf16(values[1]);
            }
        }
    }
}

// Rotates pairs that are `half` apart: a unit of each half.
template <bool kVector>
__device__ __forceinline__ void turn_halves(const Arguments& a, uint64 offset, uint64 in_table,
                                            uint32 head) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const uint64 step = static_cast<uint64>(a.head_step) * (a.plain + 2 * a.half);
    float cosines[Unit::kElements], sines[Unit::kElements];
#pragma unroll
    for (int i = 0; i < Unit::kElements; ++i) {
        cosines[i] = a.table[in_table + i];
        sines[i] = a.table[in_table + a.half + i] * a.direction;
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
        if (head + k * a.head_step < a.heads) {
            const bf16* const source = a.x + offset + k * step;
            bf16* const target = a.y + offset + k * step;
            float low[Unit::kElements], high[Unit::kElements];
            Unit::unpack(*reinterpret_cast<const Bits*>(source), low);
            Unit::unpack(*reinterpret_cast<const Bits*>(source + a.half), high);
#pragma unroll
            for (int i = 0; i < Unit::kElements; ++i) {
                const Turned turned = turn(low[i], high[i], cosines[i], sines[i]);
                low[i] = turned.low;
                high[i] = turned.high;
            }
            *reinterpret_cast<Bits*>(target) = Unit::pack(low);
            *reinterpret_cast<Bits*>(target + a.half) = Unit::pack(high);
        }
    }
}

// Neighboring threads have neighboring units, then heads, then rows.
template <bool kVector, bool kInterleaved>
__device__ __forceinline__ void rotate(const Arguments& a) {
    constexpr uint32 kElements = Bf16Unit<kVector>::kElements;
    // Pairs that a thread rotates at a time, and the elements between units.
    constexpr uint32 kPairs = kInterleaved ? (kVector ? 4 : 1) : kElements;
    constexpr uint32 kStride = kInterleaved ? 2 * kPairs : kPairs;
    const uint32 item = blockIdx.x * kThreads + threadIdx.x;
    if (item >= a.items) {
        return;
    }
    const uint32 plain_units = a.plain / kElements;
    const uint32 units = plain_units + a.half / kPairs;
    const uint32 of_heads = item / units;
    const uint32 unit = item - of_heads * units;
    const uint32 row = of_heads / a.head_step;
    const uint32 head = of_heads - row * a.head_step;
    const uint64 first =
        (static_cast<uint64>(row) * a.heads + head) * (a.plain + 2 * a.half);
    if (unit < plain_units) {
        copy<kVector>(a, first + unit * kElements, head);
        return;
    }
    const uint32 turning = unit - plain_units;
    const uint64 offset = first + a.plain + turning * kStride;
    const uint64 in_table =
        static_cast<uint64>(row % a.positions) * (2 * a.half) + turning * kPairs;
    if constexpr (kInterleaved) {
        turn_neighbors<kVector>(a, offset, in_table, head);
    } else {
        turn_halves<kVector>(a, offset, in_table, head);
    }
}

// plain is a multiple of 8 in kernels without `_scalar`, and half a multiple of 8 (interleaved: of
// 4); x, y 16-byte aligned. One thread for each of `items` units.
#define ROPE_PARTIAL_KERNEL(name, vector, interleaved)                                           \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ x, const float* __restrict__ table, bf16* __restrict__ y,  \
             uint32 items, uint32 positions, uint32 heads, uint32 plain, uint32 half,            \
             uint32 head_step, float direction) {                                                \
        rotate<vector, interleaved>(Arguments{x, table, y, items, positions, heads, plain, half, \
                                              head_step, direction});                            \
    }

ROPE_PARTIAL_KERNEL(rope_partial, true, false)
ROPE_PARTIAL_KERNEL(rope_partial_scalar, false, false)
ROPE_PARTIAL_KERNEL(rope_partial_interleaved, true, true)
ROPE_PARTIAL_KERNEL(rope_partial_interleaved_scalar, false, true)
