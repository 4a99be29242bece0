// Gradients of attention (attention.cu) on wgmma with five GEMMs. sm90_attention_backward.cu has
// seven, because it computes scores and their gradients twice; arguments and notation are the same.
//
// `rows` of sm90_attention_backward.cu computes delta and lse in powers of two. `keys` computes dk
// and dv of a tile of 128 keys and stores ds of the tile in BF16, as its GEMM of dk reads it
// (layout/stored_scores.cuh). `queries` computes dq = scale ds k. Every sum has one CTA and a fixed
// order, so results do not depend on timing. The host launches `keys` and `queries` by turns for
// some heads, so that memory for ds is bounded.
//
// Budget of `keys` as in sm90_attention_backward.cu, and 128 cycles for 16 KiB of stores per 128 x
// 64 scores. `queries` is bound by memory: it reads 32 KiB of ds for 2 x 128^2 D operations.
//
// architectures: sm_90a
#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "epilogue/sm90_attention_score_sums.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// Tensors and maps as in sm90_attention_backward.cu; `scores` is layout/stored_scores.cuh for the
// query heads of `head_count` key heads from `first_head` on, counted over all sequences.
#define KEYS(name, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_stored_keys_##name(                                              \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,          \
            float* lse_log2, float* delta, uint8* scores, uint32* counters, uint32 seq,          \
            uint32 heads, uint32 kv_heads, uint32 batch, uint32 first_head, uint32 head_count,   \
            uint32 section_heads, uint32 causal, float scale, float scale_log2) {                \
        make_key_gradients<KeyShape<false, false, true, __VA_ARGS__>>(                           \
            memory, Maps{dout, q, k, v, dk, dv}, Statistics{lse_log2, delta},                    \
            Sizes{counters, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads,   \
                  batch, section_heads, causal, scale, scale_log2},                              \
            KeyHeads{first_head, head_count, {scores}},                                          \
            SeenKeys{nullptr, static_cast<int32>(seq), static_cast<int32>(seq)});                \
    }

#define QUERIES(name, ...)                                                                       \
    extern "C" __global__ void __launch_bounds__(kSumThreads, kSumCtas)                          \
        sm90_attention_backward_stored_queries_##name(                                           \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap dq,           \
            uint8* scores, uint32 seq, uint32 heads, uint32 kv_heads, uint32 first_head,         \
            uint32 head_count, uint32 causal, float scale) {                                     \
        sum_stored_scores<SumShape<false, __VA_ARGS__>>(                                         \
            memory, k, SumResults{dq},                                                           \
            Sizes{nullptr, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads, 0, \
                  0, causal, scale, 0.0f},                                                       \
            KeyHeads{first_head, head_count, {scores}});                                         \
    }

// Elements of a head; queries of a stage; number of tiles and of stages.
KEYS(d96, 96, 64, 2, 3)
KEYS(d128, 128, 64, 2, 3)
// Elements of a head; number of stages.
QUERIES(d96, 96, 3)
QUERIES(d128, 128, 3)
