// Gradient of a table of positions: dtable[s, :] (+)= sum of dout[t, :] over the tokens t with
// (first + t) mod seq = s; rows of unused positions get zeros.
//
// dout [tokens, width] BF16, dtable [positions, width] FP32, positions >= seq. A thread has eight
// neighbouring elements of the table (16 bytes of dout), or one element, and sums the sequences in
// order, with several loads in flight. Each sum is computed by one thread in the order of the CPU
// kernel, so the bits are the same.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"

constexpr int kThreads = 128;
constexpr int kInFlight = 8;

// Reads and writes of a thread's elements, by element count.
template <int kWidth>
struct Elements;

template <>
struct Elements<8> {
    using Unit = uint4;

    static __device__ __forceinline__ void unpack(const uint4& unit, float (&values)[8]) {
        unpack_bf16x8(unit, values);
    }

    static __device__ __forceinline__ void load(const float* from, float (&values)[8]) {
        const float4 low = reinterpret_cast<const float4*>(from)[0];
        const float4 high = reinterpret_cast<const float4*>(from)[1];
        values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
        values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
    }

    static __device__ __forceinline__ void store(float* to, const float (&values)[8]) {
        reinterpret_cast<float4*>(to)[0] =
            make_float4(values[0], values[1], values[2], values[3]);
        reinterpret_cast<float4*>(to)[1] =
            make_float4(values[4], values[5], values[6], values[7]);
    }
};

template <>
struct Elements<1> {
    using Unit = bf16;

    static __device__ __forceinline__ void unpack(bf16 unit, float (&values)[1]) {
        values[0] = to_f32(unit);
    }

    static __device__ __forceinline__ void load(const float* from, float (&values)[1]) {
        values[0] = *from;
    }

    static __device__ __forceinline__ void store(float* to, const float (&values)[1]) {
        *to = values[0];
    }
};

// `units` of the table, of which the first `period` belong to positions in use; `dout_units` of
// dout, whose first unit is at `begin` of a sequence, less than `period`.
template <int kWidth>
__device__ __forceinline__ void sum_sequences(
    const typename Elements<kWidth>::Unit* __restrict__ dout, float* __restrict__ dtable,
    uint32 units, uint32 period, uint64 dout_units, uint32 begin, uint32 accumulate) {
    using Unit = typename Elements<kWidth>::Unit;
    const uint32 unit = blockIdx.x * kThreads + threadIdx.x;
    if (unit >= units) {
        return;
    }
    float sums[kWidth] = {};
    float* const target = dtable + static_cast<uint64>(unit) * kWidth;
    if (accumulate != 0) {
        Elements<kWidth>::load(target, sums);
    }
    // The first unit of dout at this position, and the number of such units.
    const uint32 own = unit < begin ? unit + period - begin : unit - begin;
    if (unit < period && own < dout_units) {
        const uint32 batch = static_cast<uint32>((dout_units - own - 1) / period) + 1;
        for (uint32 first = 0; first < batch; first += kInFlight) {
            Unit read[kInFlight];
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                read[k] = Unit{};
                if (first + k < batch) {
                    read[k] = dout[static_cast<uint64>(first + k) * period + own];
                }
            }
#pragma unroll
            for (int k = 0; k < kInFlight; ++k) {
                if (first + k < batch) {
                    float values[kWidth];
                    Elements<kWidth>::unpack(read[k], values);
#pragma unroll
                    for (int i = 0; i < kWidth; ++i) {
                        sums[i] = __fadd_rn(sums[i], values[i]);
                    }
                }
            }
        }
    }
    Elements<kWidth>::store(target, sums);
}

// For rows of whole 16-byte units.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_positions_backward_vector(const uint4* __restrict__ dout, float* __restrict__ dtable,
                                  uint32 units, uint32 period, uint64 dout_units, uint32 begin,
                                  uint32 accumulate) {
    sum_sequences<8>(dout, dtable, units, period, dout_units, begin, accumulate);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_positions_backward_scalar(const bf16* __restrict__ dout, float* __restrict__ dtable,
                                  uint32 units, uint32 period, uint64 dout_units, uint32 begin,
                                  uint32 accumulate) {
    sum_sequences<1>(dout, dtable, units, period, dout_units, begin, accumulate);
}
