// Keys and values of latent attention, and their backward, BF16:
//
//   forward   kv [tokens, heads, plain + value], k_rope [tokens, rope]
//             to k [tokens, heads, plain + rope], v [tokens, heads, value]
//   backward  dk, dv to dkv, and to dk_rope, the sum over heads from first to last in FP32,
//             rounded once: the bits of the CPU
//
// Roofline: kv, k_rope, k and v once, 2 tokens (2 heads (plain + value) + rope (heads + 1)) bytes,
// forward and backward, at memcpy bandwidth. A head of a token belongs to up to 32 lanes that move
// 16 bytes at a time, and a unit of dk_rope to one thread; `_scalar` kernels move single elements,
// for parts that are not a multiple of eight columns.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16_unit.cuh"
#include "common/types.cuh"
#include "layout/row_lanes.cuh"

constexpr uint32 kThreads = 256;

// Columns of a head, in elements or in units.
struct Columns {
    uint32 plain;  // of a key, separate for each head
    uint32 rope;   // of a key, shared by all heads
    uint32 value;

    __device__ __forceinline__ Columns in_units(uint32 elements) const {
        return Columns{plain / elements, rope / elements, value / elements};
    }
};

// Calls `each(row, unit)` for the units of `rows` rows.
template <typename Each>
__device__ __forceinline__ void for_units(uint32 rows, uint32 units, uint32 lanes,
                                          const Each& each) {
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < rows; first += at.step) {
        const uint32 row = at.row(first);
        if (row >= rows) {
            return;
        }
#pragma unroll 4
        for (uint32 unit = at.lane; unit < units; unit += lanes) {
            each(row, unit);
        }
    }
}

template <bool kVector>
__device__ __forceinline__ void forward(const bf16* __restrict__ kv,
                                        const bf16* __restrict__ k_rope, bf16* __restrict__ k,
                                        bf16* __restrict__ v, uint32 tokens, uint32 heads,
                                        Columns columns, uint32 lanes) {
    using Bits = typename Bf16Unit<kVector>::Bits;
    const Columns of = columns.in_units(Bf16Unit<kVector>::kElements);
    const Bits* const own = reinterpret_cast<const Bits*>(kv);
    const Bits* const shared = reinterpret_cast<const Bits*>(k_rope);
    // A row is a head of a token: the key, then the value.
    for_units(tokens * heads, of.plain + of.rope + of.value, lanes, [&](uint32 row, uint32 unit) {
        const uint64 source = uint64{row} * (of.plain + of.value);
        const uint64 key = uint64{row} * (of.plain + of.rope);
        if (unit < of.plain) {
            reinterpret_cast<Bits*>(k)[key + unit] = own[source + unit];
        } else if (unit < of.plain + of.rope) {
            const uint64 token = row / heads;
            reinterpret_cast<Bits*>(k)[key + unit] = shared[token * of.rope + (unit - of.plain)];
        } else {
            const uint32 in_value = unit - of.plain - of.rope;
            reinterpret_cast<Bits*>(v)[uint64{row} * of.value + in_value] =
                own[source + of.plain + in_value];
        }
    });
}

template <bool kVector>
__device__ __forceinline__ void backward(const bf16* __restrict__ dk, const bf16* __restrict__ dv,
                                         bf16* __restrict__ dkv, bf16* __restrict__ dk_rope,
                                         uint32 tokens, uint32 heads, Columns columns,
                                         uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const Columns of = columns.in_units(Unit::kElements);
    const Bits* const of_keys = reinterpret_cast<const Bits*>(dk);
    const Bits* const of_values = reinterpret_cast<const Bits*>(dv);
    for_units(tokens * heads, of.plain + of.value, lanes, [&](uint32 row, uint32 unit) {
        const uint64 source = uint64{row} * (of.plain + of.value);
        reinterpret_cast<Bits*>(dkv)[source + unit] =
            unit < of.plain ? of_keys[uint64{row} * (of.plain + of.rope) + unit]
                            : of_values[uint64{row} * of.value + (unit - of.plain)];
    });
    // Neighbouring threads have neighbouring units, so that a warp reads whole sectors.
    const uint64 step = uint64{gridDim.x} * kThreads;
    const uint64 items = uint64{tokens} * of.rope;
    for (uint64 item = uint64{blockIdx.x} * kThreads + threadIdx.x; item < items; item += step) {
        const uint64 token = item / of.rope;
        const uint32 unit = static_cast<uint32>(item - token * of.rope);
        const Bits* source = of_keys + token * heads * (of.plain + of.rope) + of.plain + unit;
        float sums[Unit::kElements] = {};
#pragma unroll 8
        for (uint32 head = 0; head < heads; ++head) {
            float values[Unit::kElements];
            Unit::unpack(*source, values);
#pragma unroll
            for (int i = 0; i < Unit::kElements; ++i) {
                sums[i] = __fadd_rn(sums[i], values[i]);
            }
            source += of.plain + of.rope;
        }
        reinterpret_cast<Bits*>(dk_rope)[item] = Unit::pack(sums);
    }
}

// kv [tokens, heads, plain + value], k_rope [tokens, rope], k [tokens, heads, plain + rope],
// v [tokens, heads, value]; 16-byte aligned; tokens * heads has 31 bits.
#define LATENT_KEY_VALUE_KERNEL(name, vector)                                                    \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ kv, const bf16* __restrict__ k_rope, bf16* __restrict__ k, \
             bf16* __restrict__ v, uint32 tokens, uint32 heads, uint32 plain, uint32 rope,       \
             uint32 value, uint32 lanes) {                                                       \
        forward<vector>(kv, k_rope, k, v, tokens, heads, Columns{plain, rope, value}, lanes);    \
    }

#define LATENT_KEY_VALUE_BACKWARD_KERNEL(name, vector)                                           \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ dk, const bf16* __restrict__ dv, bf16* __restrict__ dkv,   \
             bf16* __restrict__ dk_rope, uint32 tokens, uint32 heads, uint32 plain, uint32 rope, \
             uint32 value, uint32 lanes) {                                                       \
        backward<vector>(dk, dv, dkv, dk_rope, tokens, heads, Columns{plain, rope, value},       \
                         lanes);                                                                 \
    }

LATENT_KEY_VALUE_KERNEL(latent_key_value, true)
LATENT_KEY_VALUE_KERNEL(latent_key_value_scalar, false)
LATENT_KEY_VALUE_BACKWARD_KERNEL(latent_key_value_backward, true)
LATENT_KEY_VALUE_BACKWARD_KERNEL(latent_key_value_backward_scalar, false)
