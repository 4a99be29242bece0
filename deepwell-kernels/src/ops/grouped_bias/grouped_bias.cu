// Biases of experts, added to grouped rows of BF16 (the maps are those of dispatch.cu), and their
// backward, in FP32:
//
//   out[row]      = x[row] + gate * bias[group of the row], zero for a row without a pair
//   dbias[group] (+)= sum over the group's rows of gate * dout[row]
//   dgates[pair]  = dout[row of the pair] . bias[its group], zero for a pair without a row
//
// The gate of a row's pair is 1 if `gates` is null. Roofline: the forward reads and writes the
// rows, 4 rows columns bytes; dbias and dgates each read the rows once, 2 rows columns bytes, at
// memcpy bandwidth.
//
// Only the device knows how many rows an expert has. For dbias a CTA sums 256 columns of one run of
// a group's rows; a warp takes every eighth row of the run, a lane eight columns (16 bytes). If a
// group is split into several runs, `grouped_bias_join` adds their sums, first to last. The order
// of a sum therefore depends only on the group's rows. `_scalar` kernels are for rows that are not
// a multiple of eight columns.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16_unit.cuh"
#include "common/types.cuh"
#include "layout/row_lanes.cuh"

constexpr uint32 kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr uint32 kColumns = 256;
constexpr int kLaneColumns = kColumns / 32;
constexpr int kInFlight = 4;

static_assert(kColumns == kThreads, "a thread joins the warps' sums of one column");

// The last group that begins at or before `row`, which skips empty groups; offsets [groups + 1].
__device__ __forceinline__ uint32 group_of(const int32* __restrict__ offsets, uint32 groups,
                                           int32 row) {
    uint32 begin = 0, end = groups;
    while (end - begin > 1) {
        const uint32 middle = begin + (end - begin) / 2;
        if (offsets[middle] <= row) {
            begin = middle;
        } else {
            end = middle;
        }
    }
    return begin;
}

template <bool kVector>
__device__ __forceinline__ void forward(const bf16* __restrict__ x, const bf16* __restrict__ bias,
                                        const int32* __restrict__ offsets,
                                        const float* __restrict__ gates,
                                        const int32* __restrict__ pairs, bf16* __restrict__ out,
                                        uint32 rows, uint32 columns, uint32 groups,
                                        uint32 lanes) {
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
        const float gate = pair < 0 || gates == nullptr ? 1.0f : gates[pair];
        const uint32 group = pair < 0 ? 0 : group_of(offsets, groups, static_cast<int32>(row));
        const Bits* const of_group = reinterpret_cast<const Bits*>(bias) + uint64{group} * units;
        const uint64 start = uint64{row} * units;
#pragma unroll 4
        for (uint32 unit = at.lane; unit < units; unit += lanes) {
            Bits result = Unit::zero();
            if (pair >= 0) {
                float values[Unit::kElements], biases[Unit::kElements];
                Unit::unpack(reinterpret_cast<const Bits*>(x)[start + unit], values);
                Unit::unpack(of_group[unit], biases);
#pragma unroll
                for (int i = 0; i < Unit::kElements; ++i) {
                    // Multiplication and addition are not fused, as on the CPU.
                    values[i] = __fadd_rn(values[i], __fmul_rn(gate, biases[i]));
                }
                result = Unit::pack(values);
            }
            reinterpret_cast<Bits*>(out)[start + unit] = result;
        }
    }
}

template <bool kVector>
__device__ __forceinline__ void load_row(const bf16* __restrict__ row, uint32 column,
                                         uint32 columns, float (&values)[kLaneColumns]) {
    if constexpr (kVector) {
        if (column < columns) {
            unpack_bf16x8(*reinterpret_cast<const uint4*>(row + column), values);
        }
    } else {
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) {
            values[j] = column + j < columns ? to_f32(row[column + j]) : 0.0f;
        }
    }
}

template <bool kVector>
__device__ __forceinline__ void gradient(const bf16* __restrict__ dout,
                                         const int32* __restrict__ offsets,
                                         const float* __restrict__ gates,
                                         const int32* __restrict__ pairs, float* dbias,
                                         float* partials, uint32 columns, uint32 groups,
                                         uint32 splits, uint32 accumulate) {
    __shared__ alignas(16) float shared[kWarps][kColumns];
    const uint32 tiles = max((columns + kColumns - 1) / kColumns, 1u);
    const uint32 tile = blockIdx.x % tiles;
    const uint32 group = blockIdx.x / tiles % groups;
    const uint32 split = blockIdx.x / tiles / groups;
    const uint64 begin = offsets[group];
    const uint64 length = offsets[group + 1] - begin;
    const uint64 end = begin + length * (split + 1) / splits;
    const uint32 warp = threadIdx.x / 32;
    const uint32 lane = threadIdx.x % 32;
    const uint32 first_column = tile * kColumns + lane * kLaneColumns;

    float sums[kLaneColumns] = {};
    for (uint64 row = begin + length * split / splits + warp; row < end;
         row += kInFlight * kWarps) {
        float values[kInFlight][kLaneColumns] = {};
        float factors[kInFlight] = {};
        // Rows without a pair are not read.
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            const uint64 here = row + k * kWarps;
            const int32 pair = here < end ? pairs[here] : -1;
            if (pair >= 0) {
                factors[k] = gates == nullptr ? 1.0f : gates[pair];
                load_row<kVector>(dout + here * columns, first_column, columns, values[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
#pragma unroll
            for (int j = 0; j < kLaneColumns; ++j) {
                sums[j] += factors[k] * values[k][j];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kLaneColumns; j += 4) {
        *reinterpret_cast<float4*>(&shared[warp][lane * kLaneColumns + j]) =
            make_float4(sums[j], sums[j + 1], sums[j + 2], sums[j + 3]);
    }
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        sum += shared[w][threadIdx.x];
    }
    const uint32 column = tile * kColumns + threadIdx.x;
    if (column >= columns) {
        return;
    }
    if (splits > 1) {
        partials[(uint64{split} * groups + group) * columns + column] = sum;
    } else {
        const uint64 at = uint64{group} * columns + column;
        dbias[at] = accumulate != 0 ? dbias[at] + sum : sum;
    }
}

template <bool kVector>
__device__ __forceinline__ void of_gates(const bf16* __restrict__ dout,
                                         const bf16* __restrict__ bias,
                                         const int32* __restrict__ offsets,
                                         const int32* __restrict__ row_of_pairs,
                                         float* __restrict__ dgates, uint32 pair_count,
                                         uint32 columns, uint32 groups, uint32 lanes) {
    using Unit = Bf16Unit<kVector>;
    using Bits = typename Unit::Bits;
    const uint32 units = columns / Unit::kElements;
    const RowLanes<kThreads> at(lanes);
    for (uint32 first = at.first; first < pair_count; first += at.step) {
        const uint32 pair = at.row(first);
        const bool exists = pair < pair_count;
        const int32 row = exists ? row_of_pairs[pair] : -1;
        float dot = 0.0f;
        if (row >= 0) {
            const uint32 group = group_of(offsets, groups, row);
            const Bits* const of_row =
                reinterpret_cast<const Bits*>(dout) + uint64{static_cast<uint32>(row)} * units;
            const Bits* const of_group =
                reinterpret_cast<const Bits*>(bias) + uint64{group} * units;
#pragma unroll 4
            for (uint32 unit = at.lane; unit < units; unit += lanes) {
                float values[Unit::kElements], biases[Unit::kElements];
                Unit::unpack(of_row[unit], values);
                Unit::unpack(of_group[unit], biases);
#pragma unroll
                for (int i = 0; i < Unit::kElements; ++i) {
                    dot += values[i] * biases[i];
                }
            }
        }
        dot = at.sum(dot);
        if (exists && at.lane == 0) {
            dgates[pair] = dot;
        }
    }
}

// x, out [rows, columns], bias [groups, columns], offsets [groups + 1], pairs [rows]; gates
// [tokens, top_k] or null; 16-byte aligned.
#define GROUPED_BIAS_KERNEL(name, vector)                                                        \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ x, const bf16* __restrict__ bias,                          \
             const int32* __restrict__ offsets, const float* __restrict__ gates,                 \
             const int32* __restrict__ pairs, bf16* __restrict__ out, uint32 rows,               \
             uint32 columns, uint32 groups, uint32 lanes) {                                      \
        forward<vector>(x, bias, offsets, gates, pairs, out, rows, columns, groups, lanes);      \
    }

// dout [rows, columns], dbias [groups, columns]; grid: splits * groups * ceil(columns / 256). With
// several splits the sums go to partials [splits, groups, columns].
#define GROUPED_BIAS_GRADIENT_KERNEL(name, vector)                                               \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ dout, const int32* __restrict__ offsets,                   \
             const float* __restrict__ gates, const int32* __restrict__ pairs, float* dbias,     \
             float* partials, uint32 columns, uint32 groups, uint32 splits, uint32 accumulate) { \
        gradient<vector>(dout, offsets, gates, pairs, dbias, partials, columns, groups, splits,  \
                         accumulate);                                                            \
    }

// dout [rows, columns], bias [groups, columns], row_of_pairs, dgates [pairs].
#define GROUPED_BIAS_GATES_KERNEL(name, vector)                                                  \
    extern "C" __global__ void __launch_bounds__(kThreads)                                       \
        name(const bf16* __restrict__ dout, const bf16* __restrict__ bias,                       \
             const int32* __restrict__ offsets, const int32* __restrict__ row_of_pairs,          \
             float* __restrict__ dgates, uint32 pair_count, uint32 columns, uint32 groups,       \
             uint32 lanes) {                                                                     \
        of_gates<vector>(dout, bias, offsets, row_of_pairs, dgates, pair_count, columns, groups, \
                         lanes);                                                                 \
    }

GROUPED_BIAS_KERNEL(grouped_bias, true)
GROUPED_BIAS_KERNEL(grouped_bias_scalar, false)
GROUPED_BIAS_GRADIENT_KERNEL(grouped_bias_gradient, true)
GROUPED_BIAS_GRADIENT_KERNEL(grouped_bias_gradient_scalar, false)
GROUPED_BIAS_GATES_KERNEL(grouped_bias_gates, true)
GROUPED_BIAS_GATES_KERNEL(grouped_bias_gates_scalar, false)

// dbias [elements] from partials [splits, elements], added first to last.
extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_bias_join(const float* __restrict__ partials, float* dbias, uint64 elements,
                      uint32 splits, uint32 accumulate) {
    const uint64 step = uint64{gridDim.x} * kThreads;
    for (uint64 at = uint64{blockIdx.x} * kThreads + threadIdx.x; at < elements; at += step) {
        float sum = 0.0f;
#pragma unroll 8
        for (uint32 split = 0; split < splits; ++split) {
            sum += partials[split * elements + at];
        }
        dbias[at] = accumulate != 0 ? dbias[at] + sum : sum;
    }
}
