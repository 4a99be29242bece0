// Softmax cross-entropy of rows of logits, with the gradient in place.
//
// logits [rows, leading] FP32, of which the first `vocab` of each row are used; leading is a
// multiple of 8. For each row: losses[r] = lse - logit[target], zero for an ignored target; with
// the gradient, dlogits = loss_scale (softmax - one_hot) in BF16 in the first half of the row's
// bytes, [rows, 2 leading]. A target outside the vocabulary gives NaN.
//
// A CTA has one row; a thread has eight neighbouring logits of each tile of 4096. The first pass
// keeps a running maximum and sum of exponentials per thread; these are then joined in a fixed
// order. The second pass computes the gradient. Up to 24576 logits of the row stay in shared memory
// between the passes; the others are read again from the L2 cache. In-place writes are safe: the
// gradient of tile k overwrites only logits of tiles up to k, and a barrier separates the reads of
// a tile from memory and the writes.
//
// The last CTA of the last launch sums the losses of all tokens in FP64.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/last_cta.cuh"
#include "common/sum_f64.cuh"
#include "common/types.cuh"
#include "ptx/exp2.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kWidth = 8;
constexpr uint32 kTile = kThreads * kWidth;
// Tiles of a row whose loads are in flight at the same time.
constexpr int kInFlight = 4;
constexpr int32 kIgnoredTarget = -100;
constexpr float kLog2E = 1.4426950408889634f;
// Below every logit except -inf; unlike -inf, differences with it are defined.
constexpr float kLowest = -3.402823466e38f;
constexpr uint32 kInfinityBits = 0x7f800000u;
constexpr uint32 kNanBits = 0x7fffffffu;

// Maximum of some logits, and the sum of exp(logit - maximum).
struct Softmax {
    float greatest = kLowest;
    float sum = 0.0f;
};

__device__ __forceinline__ float exp_of(float difference) {
    return ex2(difference * kLog2E);
}

__device__ __forceinline__ Softmax join(Softmax a, Softmax b) {
    Softmax both;
    both.greatest = fmaxf(a.greatest, b.greatest);
    both.sum = a.sum * exp_of(a.greatest - both.greatest) +
               b.sum * exp_of(b.greatest - both.greatest);
    return both;
}

// Logits [first, first + 8); -inf past the end of the vocabulary.
__device__ __forceinline__ void load_logits(const float* row, uint32 first, uint32 vocab,
                                            float (&logits)[kWidth]) {
    float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 high = low;
    if (first < vocab) {
        low = *reinterpret_cast<const float4*>(row + first);
        high = *reinterpret_cast<const float4*>(row + first + 4);
    }
    const float loaded[kWidth] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        logits[j] = first + j < vocab ? loaded[j] : -__uint_as_float(kInfinityBits);
    }
}

__device__ __forceinline__ void add_logits(Softmax& softmax, const float (&logits)[kWidth]) {
    float greatest = softmax.greatest;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        greatest = fmaxf(greatest, logits[j]);
    }
    float sum = softmax.sum * exp_of(softmax.greatest - greatest);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        sum += exp_of(logits[j] - greatest);
    }
    softmax.greatest = greatest;
    softmax.sum = sum;
}

// Returns the same result in all threads.
__device__ __forceinline__ Softmax join_block(Softmax softmax) {
    __shared__ Softmax warps[kWarps];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        Softmax other;
        other.greatest = __shfl_xor_sync(0xffffffffu, softmax.greatest, distance);
        other.sum = __shfl_xor_sync(0xffffffffu, softmax.sum, distance);
        softmax = join(softmax, other);
    }
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = softmax;
    }
    __syncthreads();
    Softmax joined = warps[0];
    for (int warp = 1; warp < kWarps; ++warp) {
        joined = join(joined, warps[warp]);
    }
    return joined;
}

// Shared memory for `cached_tiles` tiles; a thread reads only its own writes.
__device__ __forceinline__ float4* cache_of(uint32 tile, uint32 half) {
    extern __shared__ float4 cache[];
    return cache + (tile * 2 + half) * kThreads + threadIdx.x;
}

template <bool kGradient>
__device__ __forceinline__ Softmax read_row(const float* row, uint32 vocab, uint32 cached_tiles) {
    Softmax softmax;
    const uint32 tiles = (vocab + kTile - 1) / kTile;
    for (uint32 tile = 0; tile < tiles; tile += kInFlight) {
        float logits[kInFlight][kWidth];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            load_logits(row, (tile + k) * kTile + threadIdx.x * kWidth, vocab, logits[k]);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
            if (kGradient && tile + k < cached_tiles) {
                const float(&l)[kWidth] = logits[k];
                *cache_of(tile + k, 0) = make_float4(l[0], l[1], l[2], l[3]);
                *cache_of(tile + k, 1) = make_float4(l[4], l[5], l[6], l[7]);
            }
            add_logits(softmax, logits[k]);
        }
    }
    return join_block(softmax);
}

// Computes the gradient of eight logits.
__device__ __forceinline__ uint4 gradient_of(const float (&logits)[kWidth], uint32 first,
                                             uint32 target, float greatest, float share,
                                             float loss_scale) {
    float gradient[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
        const float probability = exp_of(logits[j] - greatest) * share;
        gradient[j] = loss_scale * (first + j == target ? probability - 1.0f : probability);
    }
    return pack_bf16x8(gradient);
}

// `target` is outside the vocabulary if no logit of this row is the target.
__device__ __forceinline__ void write_gradient(float* row, uint32 vocab, uint32 cached_tiles,
                                               uint32 target, Softmax softmax, float loss_scale) {
    uint4* dlogits = reinterpret_cast<uint4*>(row);
    const float share = 1.0f / softmax.sum;
    const uint32 tiles = (vocab + kTile - 1) / kTile;
    for (uint32 tile = 0; tile < tiles; ++tile) {
        const uint32 unit = tile * kThreads + threadIdx.x;
        const uint32 first = unit * kWidth;
        float logits[kWidth];
        if (tile < cached_tiles) {
            const float4 low = *cache_of(tile, 0);
            const float4 high = *cache_of(tile, 1);
            const float loaded[kWidth] = {low.x,  low.y,  low.z,  low.w,
                                          high.x, high.y, high.z, high.w};
#pragma unroll
            for (int j = 0; j < kWidth; ++j) {
                logits[j] = loaded[j];
            }
        } else {
            load_logits(row, first, vocab, logits);
            __syncthreads();
        }
        if (first < vocab) {
            dlogits[unit] =
                gradient_of(logits, first, target, softmax.greatest, share, loss_scale);
        }
    }
}

__device__ __forceinline__ void write_zeros(float* row, uint32 vocab) {
    uint4* dlogits = reinterpret_cast<uint4*>(row);
    for (uint32 unit = threadIdx.x; unit * kWidth < vocab; unit += kThreads) {
        dlogits[unit] = make_uint4(0, 0, 0, 0);
    }
}

struct CrossEntropyArguments {
    float* logits;
    const int32* targets;
    const float* loss_scale;
    float* losses;
    uint32 rows;
    uint32 vocab;
    uint64 leading;
    uint32 cached_tiles;
    // For the last launch only: the losses of all tokens, [tokens], and the loss's address.
    const float* all_losses;
    uint64 tokens;
    float* loss;
    uint32 accumulate;
    uint32* arrivals;
};

template <bool kGradient>
__device__ __forceinline__ void row_loss(const CrossEntropyArguments& a) {
    float* row = a.logits + blockIdx.x * a.leading;
    const int32 target = a.targets[blockIdx.x];
    float loss = 0.0f;
    if (target == kIgnoredTarget) {
        if (kGradient) {
            write_zeros(row, a.vocab);
        }
    } else {
        const bool known = static_cast<uint32>(target) < a.vocab;
        // Read before the gradient overwrites the row.
        const float target_logit = known ? row[target] : __uint_as_float(kNanBits);
        Softmax softmax = read_row<kGradient>(row, a.vocab, a.cached_tiles);
        // The difference comes first: for a likely target it is small and exact.
        loss = (softmax.greatest - target_logit) + logf(softmax.sum);
        if (kGradient) {
            softmax.sum = known ? softmax.sum : __uint_as_float(kNanBits);
            write_gradient(row, a.vocab, a.cached_tiles, static_cast<uint32>(target), softmax,
                           *a.loss_scale);
        }
    }
    if (threadIdx.x == 0) {
        a.losses[blockIdx.x] = loss;
    }
}

// The last CTA of the last launch sums the losses of all tokens.
__device__ __forceinline__ void sum_losses(const CrossEntropyArguments& a) {
    if (a.loss == nullptr || !is_last_cta(a.arrivals, gridDim.x)) {
        return;
    }
    double sum = 0.0;
    for (uint64 token = threadIdx.x; token < a.tokens; token += kThreads) {
        sum += __ldcg(a.all_losses + token);
    }
    sum = sum_over_cta<kWarps>(sum);
    if (threadIdx.x == 0) {
        const double scaled = static_cast<double>(*a.loss_scale) * sum;
        const double before = a.accumulate ? static_cast<double>(*a.loss) : 0.0;
        *a.loss = static_cast<float>(before + scaled);
    }
}

template <bool kGradient>
__device__ __forceinline__ void cross_entropy(const CrossEntropyArguments& a) {
    if (blockIdx.x < a.rows) {
        row_loss<kGradient>(a);
    }
    sum_losses(a);
}

// Values per token that vocabulary-parallel ranks gather: the greatest logit of the rank's rows,
// the sum of exp(logit - greatest), and the target's logit, or zero.
constexpr uint32 kSums = 3;

// A rank's part of the vocabulary.
struct VocabParallel {
    const float* sums;  // [ranks, tokens, 3]
    uint32 ranks;
    uint32 first;       // vocabulary row of this rank's first row
    uint32 all;         // total rows of all ranks
    uint64 token;       // first token of the launch
};

// Computes the loss of a token from the sums of all ranks, in rank order, and the gradient of this
// rank's logits. A NaN in a rank's sum makes the loss NaN: fmaxf drops NaN, the sum keeps it.
template <bool kGradient>
__device__ __forceinline__ void row_loss_of_ranks(const CrossEntropyArguments& a,
                                                  const VocabParallel& v) {
    const int32 target = a.targets[blockIdx.x];
    float* row = a.logits + blockIdx.x * a.leading;
    float loss = 0.0f;
    if (target == kIgnoredTarget) {
        if (kGradient) {
            write_zeros(row, a.vocab);
        }
    } else {
        const float* own = v.sums + (v.token + blockIdx.x) * kSums;
        const uint64 stride = a.tokens * kSums;
        Softmax softmax;
        for (uint32 rank = 0; rank < v.ranks; ++rank) {
            softmax.greatest = fmaxf(softmax.greatest, own[rank * stride]);
        }
        float target_logit = 0.0f;
        for (uint32 rank = 0; rank < v.ranks; ++rank) {
            const float* sums = own + rank * stride;
            softmax.sum += sums[1] * exp_of(sums[0] - softmax.greatest);
            target_logit += sums[2];
        }
        if (static_cast<uint32>(target) >= v.all) {
            softmax.sum = __uint_as_float(kNanBits);
        }
        loss = (softmax.greatest - target_logit) + logf(softmax.sum);
        if (kGradient) {
            const uint32 place = static_cast<uint32>(target) - v.first;
            write_gradient(row, a.vocab, 0, place < a.vocab ? place : 0xffffffffu, softmax,
                           *a.loss_scale);
        }
    }
    if (threadIdx.x == 0) {
        a.losses[blockIdx.x] = loss;
    }
}

template <bool kGradient>
__device__ __forceinline__ void cross_entropy_of_ranks(const CrossEntropyArguments& a,
                                                       const VocabParallel& v) {
    if (blockIdx.x < a.rows) {
        row_loss_of_ranks<kGradient>(a, v);
    }
    sum_losses(a);
}

// Losses only; the grid has one CTA per row, at least one.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_loss(float* logits, const int32* targets, const float* loss_scale, float* losses,
                       uint32 rows, uint32 vocab, uint64 leading, uint32 cached_tiles,
                       const float* all_losses, uint64 tokens, float* loss, uint32 accumulate,
                       uint32* arrivals) {
    cross_entropy<false>(CrossEntropyArguments{logits, targets, loss_scale, losses, rows, vocab,
                                               leading, cached_tiles, all_losses, tokens, loss,
                                               accumulate, arrivals});
}

// Losses and the gradient of the logits; dynamic shared memory holds `cached_tiles` tiles of 16
// KiB.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    cross_entropy_gradient(float* logits, const int32* targets, const float* loss_scale,
                           float* losses, uint32 rows, uint32 vocab, uint64 leading,
                           uint32 cached_tiles, const float* all_losses, uint64 tokens,
                           float* loss, uint32 accumulate, uint32* arrivals) {
    cross_entropy<true>(CrossEntropyArguments{logits, targets, loss_scale, losses, rows, vocab,
                                              leading, cached_tiles, all_losses, tokens, loss,
                                              accumulate, arrivals});
}

// Computes a rank's values per token, sums [rows, 3]; the grid has one CTA per row.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    vocab_parallel_sums(const float* logits, const int32* targets, float* sums, uint32 vocab,
                        uint64 leading, uint32 first) {
    const float* row = logits + blockIdx.x * leading;
    const uint32 place = static_cast<uint32>(targets[blockIdx.x]) - first;
    const Softmax softmax = read_row<false>(row, vocab, 0);
    if (threadIdx.x == 0) {
        float* of_row = sums + blockIdx.x * static_cast<uint64>(kSums);
        of_row[0] = softmax.greatest;
        of_row[1] = softmax.sum;
        of_row[2] = place < vocab ? row[place] : 0.0f;
    }
}

// Losses of a rank's rows of the vocabulary, from the sums of all ranks.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    vocab_parallel_loss(float* logits, const int32* targets, const float* loss_scale,
                        float* losses, uint32 rows, uint32 vocab, uint64 leading,
                        const float* all_losses, uint64 tokens, float* loss, uint32 accumulate,
                        uint32* arrivals, const float* sums, uint32 ranks, uint32 first,
                        uint32 all, uint64 token) {
    cross_entropy_of_ranks<false>(
        CrossEntropyArguments{logits, targets, loss_scale, losses, rows, vocab, leading, 0,
                              all_losses, tokens, loss, accumulate, arrivals},
        VocabParallel{sums, ranks, first, all, token});
}

// The losses, and the gradient of the rank's logits.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    vocab_parallel_gradient(float* logits, const int32* targets, const float* loss_scale,
                            float* losses, uint32 rows, uint32 vocab, uint64 leading,
                            const float* all_losses, uint64 tokens, float* loss,
                            uint32 accumulate, uint32* arrivals, const float* sums, uint32 ranks,
                            uint32 first, uint32 all, uint64 token) {
    cross_entropy_of_ranks<true>(
        CrossEntropyArguments{logits, targets, loss_scale, losses, rows, vocab, leading, 0,
                              all_losses, tokens, loss, accumulate, arrivals},
        VocabParallel{sums, ranks, first, all, token});
}
