// Rows of tokens to rows of pairs, and sums of these per token, in BF16. The maps are those of
// dispatch.cu.
//
//   permute    out[row] = x[pairs[row] / top_k], zero for a row without a pair
//   unpermute  out[token] = sum over the token's pairs of y[rows[pair]], in FP32 in the order of
//              the pairs, rounded once; a pair without a row adds nothing
//   add_unpermute  unpermute of y + z, the sum rounded to BF16 as it would have been stored
//
// All are memory-bound: a row belongs to up to 32 lanes that move 16 bytes each at a time.
// `_scalar` kernels move single elements, for rows that are not a multiple of eight elements.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16_unit.cuh"
#include "common/types.cuh"
#include "layout/row_lanes.cuh"

constexpr uint32 kThreads = 256;

// Vectors of a row that a lane holds at a time.
constexpr uint32 kHeld = 4;

// By token: a row of x is read once and written to the rows of all of its pairs. A gather by pair
// would read the row once per pair, and x is larger than the L2 cache.
template <bool kVector>
__device__ __forceinline__ void permute(const bf16* __restrict__ x,
                                        const int32* __restrict__ rows_of_pairs,
                                        const int32* __restrict__ pairs, bf16* __restrict__ out,
                                        uint32 rows, uint32 columns, uint32 tokens, uint32 top_k,
                                        uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const uint32 units = columns / Unit::kElements;
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < tokens; first += at.step) {
        const uint32 token = at.row(first);
        if (token >= tokens) {
            break;
        }
        const int32* const of_token = rows_of_pairs + uint64{token} * top_k;
        const Bits* const source = reinterpret_cast<const Bits*>(x) + uint64{token} * units;
        for (uint32 unit = at.lane; unit < units; unit += kHeld * lanes) {
            Bits held[kHeld];
#pragma unroll
            for (uint32 i = 0; i < kHeld; ++i) {
                held[i] = Unit::zero();
                if (unit + i * lanes < units) {
                    held[i] = source[unit + i * lanes];
                }
            }
            for (uint32 choice = 0; choice < top_k; ++choice) {
                const int32 row = of_token[choice];
                if (row < 0) {
                    continue;
                }
                Bits* const target =
                    reinterpret_cast<Bits*>(out) + uint64{static_cast<uint32>(row)} * units;
#pragma unroll
                for (uint32 i = 0; i < kHeld; ++i) {
                    if (unit + i * lanes < units) {
                        target[unit + i * lanes] = held[i];
                    }
                }
            }
        }
    }
    for (uint32 first = at.first; first < rows; first += at.step) {
        const uint32 row = at.row(first);
        if (row >= rows) {
            return;
        }
        if (pairs[row] < 0) {
            Bits* const target = reinterpret_cast<Bits*>(out) + uint64{row} * units;
            for (uint32 unit = at.lane; unit < units; unit += lanes) {
                target[unit] = Unit::zero();
            }
        }
    }
}

// `z` is read only if `kAdd`.
template <bool kVector, bool kAdd>
__device__ __forceinline__ void unpermute(const bf16* __restrict__ y, const bf16* __restrict__ z,
                                          const int32* __restrict__ rows, bf16* __restrict__ out,
                                          uint32 tokens, uint32 columns, uint32 top_k,
                                          uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const uint32 units = columns / Unit::kElements;
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < tokens; first += at.step) {
        const uint32 token = at.row(first);
        if (token >= tokens) {
            return;
        }
        const int32* const of_token = rows + uint64{token} * top_k;
        Bits* const target = reinterpret_cast<Bits*>(out) + uint64{token} * units;
        for (uint32 unit = at.lane; unit < units; unit += lanes) {
            float sums[Unit::kElements] = {};
#pragma unroll 4
            for (uint32 choice = 0; choice < top_k; ++choice) {
                const int32 row = of_token[choice];
                float values[Unit::kElements] = {};
                if (row >= 0) {
                    const uint64 place = uint64{static_cast<uint32>(row)} * units + unit;
                    Unit::unpack(reinterpret_cast<const Bits*>(y)[place], values);
                    if (kAdd) {
                        float others[Unit::kElements];
                        Unit::unpack(reinterpret_cast<const Bits*>(z)[place], others);
#pragma unroll
                        for (int i = 0; i < Unit::kElements; ++i) {
                            values[i] += others[i];
                        }
                        Unit::unpack(Unit::pack(values), values);
                    }
                }
#pragma unroll
                for (int i = 0; i < Unit::kElements; ++i) {
                    sums[i] += values[i];
                }
            }
            target[unit] = Unit::pack(sums);
        }
    }
}

// x [tokens, columns], rows_of_pairs [tokens, top_k], pairs [rows], out [rows, columns]; 16-byte
// aligned. The two maps are inverse to each other.
#define PERMUTE_KERNEL(name, vector)                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ x, const int32* __restrict__ rows_of_pairs,                \
             const int32* __restrict__ pairs, bf16* __restrict__ out, uint32 rows,               \
             uint32 columns, uint32 tokens, uint32 top_k, uint32 lanes) {                        \
        permute<vector>(x, rows_of_pairs, pairs, out, rows, columns, tokens, top_k, lanes);      \
    }

// y [rows of pairs, columns], rows [tokens, top_k], out [tokens, columns]; 16-byte aligned.
#define UNPERMUTE_KERNEL(name, vector)                                                           \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ y, const int32* __restrict__ rows, bf16* __restrict__ out, \
             uint32 tokens, uint32 columns, uint32 top_k, uint32 lanes) {                        \
        unpermute<vector, false>(y, nullptr, rows, out, tokens, columns, top_k, lanes);          \
    }

// z as y.
#define ADD_UNPERMUTE_KERNEL(name, vector)                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ y, const bf16* __restrict__ z,                             \
             const int32* __restrict__ rows, bf16* __restrict__ out, uint32 tokens,              \
             uint32 columns, uint32 top_k, uint32 lanes) {                                       \
        unpermute<vector, true>(y, z, rows, out, tokens, columns, top_k, lanes);                 \
    }

PERMUTE_KERNEL(permute_bf16, true)
PERMUTE_KERNEL(permute_bf16_scalar, false)
UNPERMUTE_KERNEL(unpermute_bf16, true)
UNPERMUTE_KERNEL(unpermute_bf16_scalar, false)
ADD_UNPERMUTE_KERNEL(add_unpermute_bf16, true)
ADD_UNPERMUTE_KERNEL(add_unpermute_bf16_scalar, false)
