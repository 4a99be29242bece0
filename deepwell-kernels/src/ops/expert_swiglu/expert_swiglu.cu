// The gated activation of experts times the router's gates, and its backward, over grouped rows of
// BF16 (the maps are those of dispatch.cu), in FP32:
//
//   out   = activation(gate, up) * gates[pair]
//   dgate = dout * gates[pair] * d activation / d gate, dup likewise
//   dgates[pair] = sum over the row of dout * activation(gate, up)
//
// A row without a pair becomes zeros, and a pair without a row has a gradient of zero. Both kernels
// are memory-bound: a row belongs to up to 32 lanes that read 16 bytes of each matrix at a time.
// `_scalar` kernels process single elements, for rows that are not a multiple of eight elements.
// The other kernels sum dgates over 128 columns at a time, as in `expert_swiglu_quantize.cu`, so
// the bits are the same.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16_unit.cuh"
#include "common/expert_activation.cuh"
#include "common/types.cuh"
#include "layout/row_lanes.cuh"

constexpr uint32 kThreads = 256;

template <bool kVector, typename Activation>
__device__ __forceinline__ void forward(Activation activation, const bf16* __restrict__ gate,
                                        const bf16* __restrict__ up,
                                        const float* __restrict__ gates,
                                        const int32* __restrict__ pairs, bf16* __restrict__ out,
                                        uint32 rows, uint32 columns, uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const uint32 units = columns / Unit::kElements;
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < rows; first += at.step) {
        const uint32 row = at.row(first);
        if (row >= rows) {
            return;
        }
        const int32 pair = pairs[row];
        const float factor = pair < 0 ? 0.0f : gates[pair];
        const uint64 start = uint64{row} * units;
#pragma unroll 2
        for (uint32 unit = at.lane; unit < units; unit += lanes) {
            Bits result = Unit::zero();
            if (pair >= 0) {
                float g[Unit::kElements], u[Unit::kElements];
                Unit::unpack(reinterpret_cast<const Bits*>(gate)[start + unit], g);
                Unit::unpack(reinterpret_cast<const Bits*>(up)[start + unit], u);
#pragma unroll
                for (int i = 0; i < Unit::kElements; ++i) {
                    g[i] = activation(g[i], u[i]).value * factor;
                }
                result = Unit::pack(g);
            }
            reinterpret_cast<Bits*>(out)[start + unit] = result;
        }
    }
}

template <bool kVector, typename Activation>
__device__ __forceinline__ void backward(Activation activation, const bf16* __restrict__ dout,
                                         const bf16* __restrict__ gate,
                                         const bf16* __restrict__ up,
                                         const float* __restrict__ gates,
                                         const int32* __restrict__ row_of_pairs,
                                         const int32* __restrict__ pairs,
                                         bf16* __restrict__ dgate, bf16* __restrict__ dup,
                                         float* __restrict__ dgates, uint32 rows, uint32 columns,
                                         uint32 pair_count, uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const uint32 thread = blockIdx.x * kThreads + threadIdx.x;
    for (uint32 pair = thread; pair < pair_count; pair += gridDim.x * kThreads) {
        if (row_of_pairs[pair] < 0) {
            dgates[pair] = 0.0f;
        }
    }
    const uint32 units = columns / Unit::kElements;
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < rows; first += at.step) {
        const uint32 row = at.row(first);
        const bool exists = row < rows;
        const int32 pair = exists ? pairs[row] : -1;
        const float factor = pair < 0 ? 0.0f : gates[pair];
        const uint64 start = uint64{row} * units;
        float dot = 0.0f;
        for (uint32 base = 0; base < units; base += lanes) {
            const uint32 unit = base + at.lane;
            float part = 0.0f;
            if (exists && unit < units) {
                Bits of_gate = Unit::zero(), of_up = Unit::zero();
                if (pair >= 0) {
                    float d[Unit::kElements], g[Unit::kElements], u[Unit::kElements];
                    Unit::unpack(reinterpret_cast<const Bits*>(dout)[start + unit], d);
                    Unit::unpack(reinterpret_cast<const Bits*>(gate)[start + unit], g);
                    Unit::unpack(reinterpret_cast<const Bits*>(up)[start + unit], u);
                    expert_gradients(activation, d, factor, g, u, kVector ? part : dot);
                    of_gate = Unit::pack(g);
                    of_up = Unit::pack(u);
                }
                reinterpret_cast<Bits*>(dgate)[start + unit] = of_gate;
                reinterpret_cast<Bits*>(dup)[start + unit] = of_up;
            }
            if (kVector) {
                dot = at.add_by_sixteen(dot, part);
            }
        }
        if (!kVector) {
            dot = at.sum(dot);
        }
        if (pair >= 0 && at.lane == 0) {
            dgates[pair] = dot;
        }
    }
}

// gate, up, out [rows, columns], gates [tokens, top_k], pairs [rows]; 16-byte aligned. `alpha` and
// `limit` are parameters of the clamped activation.
#define EXPERT_SWIGLU_KERNEL(name, vector, Activation, ...)                                      \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ gate, const bf16* __restrict__ up,                         \
             const float* __restrict__ gates, const int32* __restrict__ pairs,                   \
             bf16* __restrict__ out, uint32 rows, uint32 columns, uint32 lanes, float alpha,     \
             float limit) {                                                                      \
        forward<vector>(Activation{__VA_ARGS__}, gate, up, gates, pairs, out, rows, columns,     \
                        lanes);                                                                  \
    }

// dout, gate, up, dgate, dup [rows, columns], gates, row_of_pairs, dgates [tokens, top_k],
// pairs [rows].
#define EXPERT_SWIGLU_BACKWARD_KERNEL(name, vector, Activation, ...)                             \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ dout, const bf16* __restrict__ gate,                       \
             const bf16* __restrict__ up, const float* __restrict__ gates,                       \
             const int32* __restrict__ row_of_pairs, const int32* __restrict__ pairs,            \
             bf16* __restrict__ dgate, bf16* __restrict__ dup, float* __restrict__ dgates,       \
             uint32 rows, uint32 columns, uint32 pair_count, uint32 lanes, float alpha,          \
             float limit) {                                                                      \
        backward<vector>(Activation{__VA_ARGS__}, dout, gate, up, gates, row_of_pairs, pairs,    \
                         dgate, dup, dgates, rows, columns, pair_count, lanes);                  \
    }

EXPERT_SWIGLU_KERNEL(expert_swiglu, true, Plain)
EXPERT_SWIGLU_KERNEL(expert_swiglu_scalar, false, Plain)
EXPERT_SWIGLU_KERNEL(expert_swiglu_clamped, true, Clamped, alpha, limit)
EXPERT_SWIGLU_KERNEL(expert_swiglu_clamped_scalar, false, Clamped, alpha, limit)
EXPERT_SWIGLU_BACKWARD_KERNEL(expert_swiglu_backward, true, Plain)
EXPERT_SWIGLU_BACKWARD_KERNEL(expert_swiglu_backward_scalar, false, Plain)
EXPERT_SWIGLU_BACKWARD_KERNEL(expert_swiglu_clamped_backward, true, Clamped, alpha, limit)
EXPERT_SWIGLU_BACKWARD_KERNEL(expert_swiglu_clamped_backward_scalar, false, Clamped, alpha, limit)
