// Online softmax of attention on tcgen05: a thread has a row of scores.
#pragma once

#include "common/infinity.cuh"
#include "common/types.cuh"
#include "mma/exp2_by_fma.cuh"
#include "mma/sm100_attention_tile.cuh"
#include "ptx/exp2.cuh"
#include "ptx/f32x2.cuh"
#include "ptx/max.cuh"
#include "ptx/tcgen05.cuh"

namespace sm100_attention {

constexpr float kLn2 = 0.69314718055994531f;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLeast = -3.4028234663852886e38f;

// Limit, in powers of two, by which a scaled score may exceed the reference of its row. FP32 sums
// lose no precision within it. After the first keys the limit is rarely exceeded, which saves
// nearly all corrections of sums.
constexpr float kMargin = 8.0f;

// Keys whose weights are computed and stored at a time.
constexpr int kKeysOfPart = 32;
constexpr int kPairsOfPart = kKeysOfPart / 2;
constexpr int kParts = kBlockN / kKeysOfPart;

// Of every eight pairs of keys, the last ones have exponentials from FMA units, because MUFU takes
// as long as the MMAs of a block. The MUFU of sm_103 is twice as fast.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1030
constexpr int kFmaPairsOfEight = 0;
#else
constexpr int kFmaPairsOfEight = 2;
#endif
constexpr int kMufuPairsOfEight = 8 - kFmaPairsOfEight;
constexpr int kFmaPairs = kPairsOfPart / 8 * kFmaPairsOfEight;
constexpr int kMufuPairs = kPairsOfPart - kFmaPairs;

// Position in its part of a pair of either kind.
__device__ __forceinline__ constexpr int mufu_pair(int index) {
    return index / kMufuPairsOfEight * 8 + index % kMufuPairsOfEight;
}

__device__ __forceinline__ constexpr int fma_pair(int index) {
    return kFmaPairsOfEight == 0 ? 0
                                 : index / kFmaPairsOfEight * 8 + kMufuPairsOfEight +
                                       index % kFmaPairsOfEight;
}

// Loads a row of scores.
__device__ __forceinline__ void load_scores(float (&scores)[kBlockN], uint32 address) {
    uint32 words[kParts][kKeysOfPart];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        tcgen05_load_32_columns(words[part], address + part * kKeysOfPart);
    }
    tcgen05_wait_load();
#pragma unroll
    for (int key = 0; key < kBlockN; ++key) {
        scores[key] = __uint_as_float(words[key / kKeysOfPart][key % kKeysOfPart]);
    }
}

// Sets scores of masked keys to -infinity: the row sees keys `begin` to `end` of the block.
__device__ __forceinline__ void mask(float (&scores)[kBlockN], int32 begin, int32 end) {
#pragma unroll
    for (int key = 0; key < kBlockN; ++key) {
        if (key < begin || key >= end) {
            scores[key] = minus_infinity();
        }
    }
}

// Softmax of a row, in powers of two. The reference is raised to the maximum score only if a score
// exceeds it by more than the margin. The reference of a row with a NaN is NaN. Weights are
// 2^(scaled score - reference).
struct RowSoftmax {
    float reference = kLeast;  // scaled

    // Begins a block: raises the reference. Returns the factor for the sums so far.
    __device__ __forceinline__ float raise(const float (&scores)[kBlockN], float scale_log2) {
        float tops[4] = {scores[0], scores[1], scores[2], scores[3]};
#pragma unroll
        for (int key = 4; key < kBlockN; key += 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int second = key + 4 + i;
                tops[i] = second < kBlockN
                              ? max_or_nan(tops[i], scores[key + i], scores[second])
                              : max_or_nan(tops[i], scores[key + i]);
            }
        }
        const float top = max_or_nan(max_or_nan(tops[0], tops[1], tops[2]), tops[3]);
        // Not "greater": a NaN rises, too.
        const bool rises = !(fmaf(top, scale_log2, -kMargin) <= reference);
        const float raised = rises ? max_or_nan(top * scale_log2, reference) : reference;
        const float factor = ex2(reference - raised);
        reference = raised;
        for (FloatPair& sum : sums_) {
            sum = multiply(sum, pair_of(factor, factor));
        }
        return factor;
    }

    // Turns the scores of a part of the block into weights, and stores these as BF16. Parts are
    // processed in order. Instructions are in an order that keeps MUFU busy.
    __device__ __forceinline__ void weigh(float (&scores)[kBlockN], int part, float scale_log2,
                                          uint32 address) {
        const FloatPair scale = pair_of(scale_log2, scale_log2);
        const FloatPair offset = pair_of(-reference, -reference);
        float* const of_part = scores + part * kKeysOfPart;
        uint32 words[kPairsOfPart];
        // Begins a pair's exponentials: the exponents.
        const auto exponents = [&](int pair) {
            return multiply_add(pair_of(of_part[2 * pair], of_part[2 * pair + 1]), scale, offset);
        };
        const auto end_pair = [&](int pair) {
            words[pair] = to_bf16_pair(of_part[2 * pair], of_part[2 * pair + 1]);
            // The weights of the last part are added in `end`, after their arrival.
            if (part < kParts - 1) {
                add_pair(of_part, pair);
            }
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
            const int pair = mufu_pair(i);
            float first, second;
            unpack(ahead[i % kAhead], first, second);
            of_part[2 * pair] = ex2(first);
            if (i + kAhead < kMufuPairs) {
                ahead[i % kAhead] = exponents(mufu_pair(i + kAhead));
            }
            if (kFmaPairs > 0 && i < by_fma.kSteps) {
                by_fma.step(i);
            }
            of_part[2 * pair + 1] = ex2(second);
            if (i >= kAhead) {
                end_pair(mufu_pair(i - kAhead));
            }
        }
        static_assert(kFmaPairs == 0 || kMufuPairs >= 8, "all steps");
#pragma unroll
        for (int i = 0; i < kFmaPairs; ++i) {
            const int pair = fma_pair(i);
            unpack(by_fma.power(i), of_part[2 * pair], of_part[2 * pair + 1]);
            end_pair(pair);
        }
#pragma unroll
        for (int i = kMufuPairs - kAhead; i < kMufuPairs; ++i) {
            end_pair(mufu_pair(i));
        }
        tcgen05_store_16_columns(address + part * kPairsOfPart, words);
    }

    // Ends a block: adds the weights of the last part.
    __device__ __forceinline__ void end(const float (&weights)[kBlockN]) {
#pragma unroll
        for (int pair = 0; pair < kPairsOfPart; ++pair) {
            add_pair(weights + (kParts - 1) * kKeysOfPart, pair);
        }
    }

    // Sum of all weights.
    __device__ __forceinline__ float sum() const {
        float low, high;
        unpack(add(sums_[0], sums_[1]), low, high);
        return low + high;
    }

  private:
    // Pairs between the exponents and the exponentials of a pair, and its conversion.
    static constexpr int kAhead = 2;
    // Independent chains of additions.
    static constexpr int kSums = 2;
    FloatPair sums_[kSums] = {{0}, {0}};

    __device__ __forceinline__ void add_pair(const float* weights, int pair) {
        FloatPair& sum = sums_[pair % kSums];
        sum = add(sum, pair_of(weights[2 * pair], weights[2 * pair + 1]));
    }
};

}  // namespace sm100_attention
