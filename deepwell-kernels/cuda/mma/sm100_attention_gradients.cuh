// Weights and score gradients of attention on tcgen05, in the layout of ptx/tcgen05_16_lanes.cuh.
//
// A warp has 32 keys and a half of the queries of a tile. With p = 2^(scale_log2 score - lse) and
// dp = dout v^T: ds = p (dp - delta). Lse and delta are of a query, which is a column.
#pragma once

#include "common/infinity.cuh"
#include "common/types.cuh"
#include "layout/score_gradients.cuh"
#include "mma/exp2_by_fma.cuh"
#include "mma/sm100_attention_backward_tile.cuh"
#include "ptx/exp2.cuh"
#include "ptx/f32x2.cuh"
#include "ptx/special_register.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tcgen05_16_lanes.cuh"

namespace sm100_attention_backward {

constexpr int kEights = kHalfQueries / 8;      // groups of eight queries of a half
constexpr int kPartEights = kEights / kParts;
constexpr int kLaneGroups = 2;                 // of 16 lanes, of a warp
constexpr int kThreadKeys = 4;                 // l / 4, and 8, 16, 24 more

// Of a thread's four keys, one has exponentials from FMA units, in every group of eight queries
// another, because MUFU takes as long as half of the MMAs, and weights are waited for. The MUFU of
// sm_103 is twice as fast.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1030
constexpr int kFmaPairs = 0;
#else
constexpr int kFmaPairs = kPartEights;
#endif
constexpr int kPartPairs = kPartEights * kThreadKeys;
constexpr int kMufuPairs = kPartPairs - kFmaPairs;

// A thread's statistics: pairs of queries.
struct Columns {
    FloatPair of[kEights];

    // From shared memory, of the queries of a half.
    __device__ __forceinline__ void read(const float* statistics) {
        const uint32 first = thread_index_again() % 4 * 2;
#pragma unroll
        for (int eight = 0; eight < kEights; ++eight) {
            const float2 both =
                *reinterpret_cast<const float2*>(statistics + 8 * eight + first);
            of[eight] = pair_of(both.x, both.y);
        }
    }

    __device__ __forceinline__ void negate() {
#pragma unroll
        for (FloatPair& pair : of) {
            pair = multiply(pair, pair_of(-1.0f, -1.0f));
        }
    }
};

// Score gradients of a thread as BF16, as they are stored to tensor memory.
struct PackedGradients {
    uint32 words[kLaneGroups][kParts][2 * kPartEights];

    // Stores to global memory, to the thread's place in a tile.
    __device__ __forceinline__ void store(uint8* stored) const {
        static_assert(kPartEights == 4, "a row of a core matrix, 16 bytes");
#pragma unroll
        for (int group = 0; group < kLaneGroups; ++group) {
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                uint8* target = stored + group * 2 * ScoreGradients::kEightKeysBytes +
                                part * kPartEights * ScoreGradients::kCoreBytes;
                const uint32(&of_part)[2 * kPartEights] = words[group][part];
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    *reinterpret_cast<uint4*>(target + eight * ScoreGradients::kEightKeysBytes) =
                        make_uint4(of_part[eight], of_part[2 + eight], of_part[4 + eight],
                                   of_part[6 + eight]);
                }
            }
        }
    }
};

// Scores, then weights, of a thread: [16 lanes][4 x eight + 2 x (8 lanes) + query].
struct Weights {
    float of[kLaneGroups][4 * kEights];

    __device__ __forceinline__ void load(uint32 address) {
        uint32 words[kLaneGroups][4 * kEights];
#pragma unroll
        for (int group = 0; group < kLaneGroups; ++group) {
            tcgen05_load_64_columns_of_16_lanes(words[group], address + (group * 16 << 16));
        }
        tcgen05_wait_load();
#pragma unroll
        for (int group = 0; group < kLaneGroups; ++group) {
#pragma unroll
            for (int i = 0; i < 4 * kEights; ++i) {
                of[group][i] = __uint_as_float(words[group][i]);
            }
        }
    }

    // Sets scores to -infinity, except those of queries `begin` to `end` of the half, for each of
    // the thread's keys.
    __device__ __forceinline__ void mask(const int32 (&begin)[kThreadKeys],
                                         const int32 (&end)[kThreadKeys]) {
        const int32 first = thread_index_again() % 4 * 2;
#pragma unroll
        for (int i = 0; i < kThreadKeys * 2 * kEights; ++i) {
            const int key = i / 2 % kThreadKeys;
            const int32 query = i / (2 * kThreadKeys) * 8 + first + i % 2;
            if (query < begin[key] || query >= end[key]) {
                at(i) = minus_infinity();
            }
        }
    }

    // Turns the scores of a part of the queries into weights, and stores these as BF16.
    // Instructions are in an order that keeps MUFU busy.
    __device__ __forceinline__ void weigh(int part, const Columns& minus_lse, float scale_log2,
                                          uint32 address) {
        const FloatPair scale = pair_of(scale_log2, scale_log2);
        const int first = part * kPartPairs;
        const auto exponents = [&](int pair) {
            const int at_pair = first + pair;
            const FloatPair scores = pair_of(at(2 * at_pair), at(2 * at_pair + 1));
            return multiply_add(scores, scale, minus_lse.of[at_pair / kThreadKeys]);
        };
        uint32 words[kLaneGroups][2 * kPartEights];
        const auto end_pair = [&](int pair) {
            const int at_pair = first + pair;
            words[pair % kThreadKeys / 2][pair / kThreadKeys * 2 + pair % 2] =
                to_bf16_pair(at(2 * at_pair), at(2 * at_pair + 1));
        };
        Exp2ByFma<kFmaPairs == 0 ? 1 : kFmaPairs> by_fma;
        FloatPair ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            ahead[i] = exponents(mufu_pair(i));
        }
#pragma unroll
        for (int i = 0; i < kFmaPairs; ++i) {
            by_fma.x[i] = exponents(fma_pair(i));
        }
#pragma unroll
        for (int i = 0; i < kMufuPairs; ++i) {
            const int pair = first + mufu_pair(i);
            float low, high;
            unpack(ahead[i % kAhead], low, high);
            at(2 * pair) = ex2(low);
            if (i + kAhead < kMufuPairs) {
                ahead[i % kAhead] = exponents(mufu_pair(i + kAhead));
            }
            if (kFmaPairs > 0 && i < by_fma.kSteps) {
                by_fma.step(i);
            }
            at(2 * pair + 1) = ex2(high);
            if (i >= kAhead) {
                end_pair(mufu_pair(i - kAhead));
            }
        }
        static_assert(kFmaPairs == 0 || kMufuPairs >= 8, "all steps");
#pragma unroll
        for (int i = 0; i < kFmaPairs; ++i) {
            const int pair = first + fma_pair(i);
            unpack(by_fma.power(i), at(2 * pair), at(2 * pair + 1));
            end_pair(fma_pair(i));
        }
#pragma unroll
        for (int i = kMufuPairs - kAhead; i < kMufuPairs; ++i) {
            end_pair(mufu_pair(i));
        }
#pragma unroll
        for (int group = 0; group < kLaneGroups; ++group) {
            tcgen05_store_16_columns_of_16_lanes(
                address + (group * 16 << 16) + part * (kPartQueries / 2), words[group]);
        }
    }

    // Computes score gradients from the products at `products`, and stores them as BF16 to tensor
    // memory at `gradients`.
    __device__ __forceinline__ PackedGradients differentiate(const Columns& delta,
                                                             uint32 products,
                                                             uint32 gradients) const {
        PackedGradients packed;
#pragma unroll
        for (int group = 0; group < kLaneGroups; ++group) {
            const uint32 lanes = group * 16 << 16;
            uint32 dp[4 * kEights];
            tcgen05_load_64_columns_of_16_lanes(dp, products + lanes);
            tcgen05_wait_load();
#pragma unroll
            for (int pair = 0; pair < 2 * kEights; ++pair) {
                const FloatPair products_of_pair =
                    pair_of(__uint_as_float(dp[2 * pair]), __uint_as_float(dp[2 * pair + 1]));
                const FloatPair weights_of_pair =
                    pair_of(of[group][2 * pair], of[group][2 * pair + 1]);
                float low, high;
                unpack(multiply(weights_of_pair, subtract(products_of_pair, delta.of[pair / 2])),
                       low, high);
                packed.words[group][pair / (2 * kPartEights)][pair % (2 * kPartEights)] =
                    to_bf16_pair(low, high);
            }
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                tcgen05_store_16_columns_of_16_lanes(
                    gradients + lanes + part * (kPartQueries / 2), packed.words[group][part]);
            }
        }
        return packed;
    }

  private:
    // Pairs between the exponents and the exponentials of a pair, and its conversion.
    static constexpr int kAhead = 2;

    // Pairs in the order of queries, and of the thread's keys for each.
    __device__ __forceinline__ float& at(int i) {
        const int pair = i / 2;
        const int key = pair % kThreadKeys;
        return of[key / 2][4 * (pair / kThreadKeys) + 2 * (key % 2) + i % 2];
    }

    // Position in a part of the pairs of either kind.
    static __device__ __forceinline__ constexpr int fma_pair(int index) {
        return index * kThreadKeys + index % kThreadKeys;
    }

    static __device__ __forceinline__ constexpr int mufu_pair(int index) {
        if (kFmaPairs == 0) {
            return index;
        }
        const int eight = index / (kThreadKeys - 1);
        const int in_eight = index % (kThreadKeys - 1);
        return eight * kThreadKeys + in_eight + (in_eight >= eight % kThreadKeys ? 1 : 0);
    }
};

}  // namespace sm100_attention_backward
