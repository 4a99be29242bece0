// The router of a mixture of experts and its backward, with one warp per token.
//
// The definition is that of `deepwell_moe::TokenRouter`: scores in FP64, the `top_k` experts of the
// largest key (score plus bias), ties to the lower index, gates from the scores without the bias.
// Scores are in FP64, as on the CPU, so that both choose the same experts: different FP32 logits
// have different FP64 scores, but may have equal FP32 scores. Non-finite logits give gates of NaN,
// and distinct existing experts.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/token_scores.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 128;
constexpr uint32 kWarps = kThreads / 32;
// Experts per lane: a set bit marks an available expert.
constexpr uint32 kOfLane = 32;
// Added to the sum by which scores are divided, as in the definition.
constexpr double kSumFloor = 1e-20;
constexpr uint32 kNobody = 0xffffffffu;

extern __shared__ double scratch[];

// Maps a number to an integer of the same order; zeros of both signs are equal, and NaN is beyond
// the infinities.
__device__ __forceinline__ uint64 order_of(double key) {
    const uint64 bits = __double_as_longlong(key + 0.0);
    constexpr uint64 kSign = uint64{1} << 63;
    return bits & kSign ? ~bits : bits | kSign;
}

// Returns to every lane the index of the warp's largest available key; of equal keys the lowest
// index wins. Bit i of `open` is index 32 * i + lane. At least one index is open.
template <typename Key>
__device__ __forceinline__ uint32 best_of_warp(uint32 open, const Key& key) {
    uint64 best = 0;
    uint32 index = kNobody;
    for (uint32 left = open; left != 0; left &= left - 1) {
        const uint32 next = (__ffs(left) - 1) * 32 + threadIdx.x % 32;
        const uint64 own = order_of(key(next));
        // Within a lane the first index stays unless a later key is larger.
        if (index == kNobody || own > best) {
            best = own;
            index = next;
        }
    }
    // In two halves, because a warp reduces 32 bits in one instruction.
    const uint32 high = static_cast<uint32>(best >> 32);
    const bool has_high = high == __reduce_max_sync(0xffffffffu, high);
    const uint32 low = has_high ? static_cast<uint32>(best) : 0;
    const bool has_low = low == __reduce_max_sync(0xffffffffu, low);
    return __reduce_min_sync(0xffffffffu, has_high && has_low ? index : kNobody);
}

// The mask of the calling lane over `count` indices: bit i is set if 32 * i + lane exists.
__device__ __forceinline__ uint32 all_open(uint32 count) {
    const uint32 lane = threadIdx.x % 32;
    const uint32 own = lane < count ? (count - lane + 31) / 32 : 0;
    return own >= kOfLane ? 0xffffffffu : (1u << own) - 1;
}

__device__ __forceinline__ void close(uint32& open, uint32 index) {
    if (index % 32 == threadIdx.x % 32) {
        open &= ~(1u << index / 32);
    }
}

// The sum of the two best keys of a group of `size` experts; for a single expert, its key.
template <typename Key>
__device__ __forceinline__ double quality(uint32 group, uint32 size, const Key& key) {
    const uint32 first = group * size;
    uint32 best = first;
    for (uint32 i = first + 1; i < first + size; ++i) {
        best = key(i) > key(best) ? i : best;
    }
    if (size == 1) {
        return key(best);
    }
    uint32 second = best == first ? first + 1 : first;
    for (uint32 i = second + 1; i < first + size; ++i) {
        if (i != best && key(i) > key(second)) {
            second = i;
        }
    }
    return key(best) + key(second);
}

// logits [tokens, experts], bias [experts] or null, gates and chosen [tokens, top_k].
// `groups_chosen` of `groups` are eligible; `groups` is 0 without groups. Dynamic shared memory:
// per warp the scores, then the qualities of groups. At most 1024 experts.
extern "C" __global__ void __launch_bounds__(kThreads)
    route(const float* __restrict__ logits, const float* __restrict__ bias,
          float* __restrict__ gates, int32* __restrict__ chosen, uint32 tokens, uint32 experts,
          uint32 top_k, uint32 is_sigmoid, uint32 normalize, uint64 scaling_bits, uint32 groups,
          uint32 groups_chosen) {
    const double scaling = __longlong_as_double(scaling_bits);
    const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double* const scores = scratch + warp * (experts + groups);
    double* const qualities = scores + experts;
    const auto key = [&](uint32 expert) {
        return bias == nullptr ? scores[expert] : scores[expert] + double{bias[expert]};
    };
    for (uint32 token = blockIdx.x * kWarps + warp; token < tokens; token += gridDim.x * kWarps) {
        const float* const row = logits + uint64{token} * experts;
        token_scores(row, experts, is_sigmoid, scores);
        __syncwarp();
        uint32 open = all_open(experts);
        if (groups > 0) {
            const uint32 size = experts / groups;
            for (uint32 group = lane; group < groups; group += 32) {
                qualities[group] = quality(group, size, key);
            }
            __syncwarp();
            uint32 candidates = all_open(groups), reached = 0;
            for (uint32 i = 0; i < groups_chosen; ++i) {
                const uint32 group =
                    best_of_warp(candidates, [&](uint32 index) { return qualities[index]; });
                close(candidates, group);
                for (uint32 left = open; left != 0; left &= left - 1) {
                    const uint32 bit = __ffs(left) - 1;
                    if ((bit * 32 + lane) / size == group) {
                        reached |= 1u << bit;
                    }
                }
            }
            open = reached;
        }
        int32* const own = chosen + uint64{token} * top_k;
        double sum = 0.0;
        for (uint32 choice = 0; choice < top_k; ++choice) {
            const uint32 expert = best_of_warp(open, key);
            close(open, expert);
            sum += scores[expert];
            if (lane == 0) {
                own[choice] = expert;
            }
        }
        const double divisor = normalize ? sum + kSumFloor : 1.0;
        __syncwarp();
        for (uint32 choice = lane; choice < top_k; choice += 32) {
            const double score = scores[own[choice]];
            gates[uint64{token} * top_k + choice] = static_cast<float>(scaling * score / divisor);
        }
        // The next token's scores overwrite these.
        __syncwarp();
    }
}

// dgates and chosen [tokens, top_k], logits and dlogits [tokens, experts]. Dynamic shared memory:
// each warp's scores. A nonexistent expert contributes nothing.
extern "C" __global__ void __launch_bounds__(kThreads)
    route_backward(const float* __restrict__ dgates, const float* __restrict__ logits,
                   const int32* __restrict__ chosen, float* __restrict__ dlogits, uint32 tokens,
                   uint32 experts, uint32 top_k, uint32 is_sigmoid, uint32 normalize,
                   uint64 scaling_bits) {
    const double scaling = __longlong_as_double(scaling_bits);
    const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double* const scores = scratch + warp * experts;
    for (uint32 token = blockIdx.x * kWarps + warp; token < tokens; token += gridDim.x * kWarps) {
        const uint64 first = uint64{token} * experts;
        token_scores(logits + first, experts, is_sigmoid, scores);
        __syncwarp();
        const int32* const own = chosen + uint64{token} * top_k;
        const float* const of_gates = dgates + uint64{token} * top_k;
        // Every lane computes the same sums over the choices, in order: few numbers, needed by all
        // lanes.
        double divisor = 1.0, mean = 0.0;
        if (normalize) {
            double sum = 0.0, weighted = 0.0;
            for (uint32 choice = 0; choice < top_k; ++choice) {
                const uint32 expert = own[choice];
                if (expert < experts) {
                    sum += scores[expert];
                    weighted += scaling * double{of_gates[choice]} * scores[expert];
                }
            }
            divisor = sum + kSumFloor;
            mean = weighted / divisor;
        }
        // The gradient of a chosen expert's score; the gradient of other scores is zero.
        const auto dscore = [&](uint32 choice) {
            return (scaling * double{of_gates[choice]} - mean) / divisor;
        };
        double through_softmax = 0.0;
        if (!is_sigmoid) {
            for (uint32 choice = 0; choice < top_k; ++choice) {
                const uint32 expert = own[choice];
                if (expert < experts) {
                    through_softmax += scores[expert] * dscore(choice);
                }
            }
        }
        for (uint32 expert = lane; expert < experts; expert += 32) {
            double d = 0.0;
            for (uint32 choice = 0; choice < top_k; ++choice) {
                if (static_cast<uint32>(own[choice]) == expert) {
                    d = dscore(choice);
                }
            }
            const double score = scores[expert];
            const double dlogit =
                is_sigmoid ? d * score * (1.0 - score) : score * (d - through_softmax);
            dlogits[first + expert] = static_cast<float>(dlogit);
        }
        __syncwarp();
    }
}
