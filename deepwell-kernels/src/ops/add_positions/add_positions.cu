// Learned positions: out[t, :] = x[t, :] + table[(first + t) mod seq, :].
//
// x, out [tokens, width], table [positions, width], positions >= seq, all BF16. The first `seq`
// rows of the table are one run of seq * width numbers that repeats over x, so tiles of x need not
// begin or end at rows. Neighbouring threads have neighbouring units of 16 bytes (or single
// elements); each thread reads several units at once.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/norm_value.cuh"

constexpr int kThreads = 256;
constexpr int kUnitsPerThread = 4;
constexpr int kTile = kThreads * kUnitsPerThread;

__device__ __forceinline__ uint4 add(const uint4& a, const uint4& b) {
    return add_bf16x8(a, b);
}

__device__ __forceinline__ bf16 add(bf16 a, bf16 b) {
    return to_bf16(to_f32(a) + to_f32(b));
}

// `units` of x, `period` units per sequence (less than 2^31). `begin`: position of the first unit
// within its sequence, less than `period`.
template <typename Unit>
__device__ __forceinline__ void add_positions(const Unit* __restrict__ x,
                                              const Unit* __restrict__ table,
                                              Unit* __restrict__ out, uint64 units,
                                              uint32 period, uint32 begin) {
    const uint64 stride = static_cast<uint64>(gridDim.x) * kTile;
    for (uint64 tile = static_cast<uint64>(blockIdx.x) * kTile; tile < units; tile += stride) {
        const uint32 in_sequence = static_cast<uint32>((tile + begin) % period);
        Unit from[kUnitsPerThread], of_position[kUnitsPerThread];
#pragma unroll
        for (int k = 0; k < kUnitsPerThread; ++k) {
            const uint32 ahead = threadIdx.x + k * kThreads;
            from[k] = of_position[k] = Unit{};
            if (tile + ahead < units) {
                from[k] = x[tile + ahead];
                of_position[k] = table[(in_sequence + ahead) % period];
            }
        }
#pragma unroll
        for (int k = 0; k < kUnitsPerThread; ++k) {
            const uint64 at = tile + threadIdx.x + k * kThreads;
            if (at < units) {
                out[at] = add(from[k], of_position[k]);
            }
        }
    }
}

// For rows of whole 16-byte units.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_positions_16_bytes(const uint4* __restrict__ x, const uint4* __restrict__ table,
                           uint4* __restrict__ out, uint64 units, uint32 period,
                           uint32 begin) {
    add_positions(x, table, out, units, period, begin);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_positions_2_bytes(const bf16* __restrict__ x, const bf16* __restrict__ table,
                          bf16* __restrict__ out, uint64 units, uint32 period,
                          uint32 begin) {
    add_positions(x, table, out, units, period, begin);
}
