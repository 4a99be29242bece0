// The auxiliary losses of a router with the gradient of the logits, in FP64 as defined by
// `deepwell_moe::router_losses`:
//
//   loss (+)= share * (sum over tokens and experts of weight[e] * p + z / T * sum of lse^2)
//
// with weight[e] = balance * E / (T * T * K) * count[e], where count[e] is the number of pairs that
// chose an expert; p the probability of an expert for a token (with sigmoid scores, the score's
// share of the token's sum); lse the logarithm of the sum of a token's exponentials; share =
// loss_scale * number of counted targets. The gradient is divided by the number of ranks that
// compute it for the same tokens and then sum their gradients.
//
// `router_loss_count` counts, in one part per CTA. In `router_loss` every CTA adds up these parts,
// each warp processes one token at a time, and the last CTA sums the losses in order.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/last_cta.cuh"
#include "common/sum_f64.cuh"
#include "common/token_scores.cuh"
#include "common/types.cuh"

constexpr uint32 kThreads = 256;
constexpr uint32 kWarps = kThreads / 32;
// Added to the sum by which scores are divided, as in the definition.
constexpr double kSumFloor = 1e-20;

extern __shared__ double scratch[];

// counts [gridDim.x, experts + 1]: number of pairs of each expert, and of targets other than
// `ignored`, in the CTA's part. Dynamic shared memory: experts + 1 counts.
extern "C" __global__ void __launch_bounds__(kThreads)
    router_loss_count(const int32* __restrict__ chosen, const int32* __restrict__ targets,
                      uint32* __restrict__ counts, uint32 pair_count, uint32 tokens,
                      uint32 experts, int32 ignored) {
    uint32* const own = reinterpret_cast<uint32*>(scratch);
    for (uint32 i = threadIdx.x; i <= experts; i += kThreads) {
        own[i] = 0;
    }
    __syncthreads();
    const uint32 thread = blockIdx.x * kThreads + threadIdx.x;
    const uint32 threads = gridDim.x * kThreads;
    // Integer sums do not depend on the order.
    for (uint32 pair = thread; pair < pair_count; pair += threads) {
        const uint32 expert = chosen[pair];
        if (expert < experts) {
            atomicAdd(own + expert, 1u);
        }
    }
    for (uint32 token = thread; token < tokens; token += threads) {
        if (targets[token] != ignored) {
            atomicAdd(own + experts, 1u);
        }
    }
    __syncthreads();
    for (uint32 i = threadIdx.x; i <= experts; i += kThreads) {
        counts[uint64{blockIdx.x} * (experts + 1) + i] = own[i];
    }
}

// logits [tokens, experts], loss_scale [1], loss [1], dlogits [tokens, experts] or null, counts of
// `counting_ctas`, partials [gridDim.x], arrivals [1]. `balance_bits` are balance * E / (T * T * K)
// and `z_bits` z / T. Dynamic shared memory: one weight per expert, and two numbers per warp and
// expert.
extern "C" __global__ void __launch_bounds__(kThreads)
    router_loss(const float* __restrict__ logits, const float* __restrict__ loss_scale,
                float* loss, float* __restrict__ dlogits, const uint32* __restrict__ counts,
                double* partials, uint32* arrivals, uint32 tokens, uint32 experts,
                uint32 is_sigmoid, uint64 balance_bits, uint64 z_bits, uint32 counting_ctas,
                uint32 ranks, uint32 accumulate) {
    const double balance = __longlong_as_double(balance_bits);
    const double z = __longlong_as_double(z_bits);
    const uint32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    double* const weights = scratch;
    double* const probabilities = weights + experts + warp * 2 * experts;
    double* const scores = probabilities + experts;
    const auto count = [&](uint32 index) {
        uint32 sum = 0;
        for (uint32 cta = 0; cta < counting_ctas; ++cta) {
            sum += counts[cta * (experts + 1) + index];
        }
        return sum;
    };
    for (uint32 expert = threadIdx.x; expert < experts; expert += kThreads) {
        weights[expert] = balance * count(expert);
    }
    const double share = double{*loss_scale} * count(experts);
    const double of_rank = share / ranks;
    __syncthreads();

    double own_loss = 0.0;
    for (uint32 token = blockIdx.x * kWarps + warp; token < tokens; token += gridDim.x * kWarps) {
        const uint64 first = uint64{token} * experts;
        const double log_sum = token_softmax(logits + first, experts, probabilities);
        double sum = 1.0, weighted = 0.0;
        if (is_sigmoid) {
            token_scores(logits + first, experts, is_sigmoid, scores);
            double of_lane = 0.0;
            for (uint32 expert = lane; expert < experts; expert += 32) {
                of_lane += scores[expert];
            }
            sum = sum_of_warp_f64(of_lane) + kSumFloor;
        }
        // A lane reads only its own writes.
        const double* const of_balance = is_sigmoid ? scores : probabilities;
        for (uint32 expert = lane; expert < experts; expert += 32) {
            weighted += of_balance[expert] / sum * weights[expert];
        }
        weighted = sum_of_warp_f64(weighted);
        own_loss += weighted + z * log_sum * log_sum;
        if (dlogits == nullptr) {
            continue;
        }
        for (uint32 expert = lane; expert < experts; expert += 32) {
            const double score = of_balance[expert], d = weights[expert] - weighted;
            const double of_scores = is_sigmoid ? d / sum * score * (1.0 - score) : score * d;
            const double of_z = 2.0 * z * log_sum * probabilities[expert];
            dlogits[first + expert] = static_cast<float>(of_rank * (of_scores + of_z));
        }
    }
    const double of_cta = sum_over_cta<kWarps>(lane == 0 ? own_loss : 0.0);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = of_cta;
    }
    if (!is_last_cta(arrivals, gridDim.x)) {
        return;
    }
    double joined = 0.0;
    for (uint32 cta = threadIdx.x; cta < gridDim.x; cta += kThreads) {
        joined += __ldcg(partials + cta);
    }
    const double total = sum_over_cta<kWarps>(joined);
    if (threadIdx.x == 0) {
        const double before = accumulate ? double{*loss} : 0.0;
        *loss = static_cast<float>(before + share * total);
    }
}
