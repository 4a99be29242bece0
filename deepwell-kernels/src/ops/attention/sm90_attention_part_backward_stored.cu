// Gradients of attention to a part of the keys on wgmma with five GEMMs:
// sm90_attention_part_backward.cu in the frame of sm90_attention_backward_stored.cu.
//
// architectures: sm_90a
#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "epilogue/sm90_attention_score_sums.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_part_rows.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// Tensors and maps as in sm90_attention_part_backward.cu; `scores`, `first_head` and `head_count`
// as in sm90_attention_backward_stored.cu.
#define KEYS(name, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_part_backward_stored_keys_##name(                                         \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, float* dk, \
            float* dv, float* lse_log2, float* delta, uint8* scores, uint32* counters,           \
            uint32 queries, uint32 keys, uint32 seq, uint32 heads, uint32 kv_heads,              \
            uint32 head_dim, uint32 batch, uint32 first_head, uint32 head_count,                 \
            uint32 section_heads, uint32 causal, float scale, float scale_log2) {                \
        const int32 key_count = static_cast<int32>(keys);                                        \
        make_key_gradients<KeyShape<false, true, true, __VA_ARGS__>>(                            \
            memory,                                                                              \
            Maps{dout, q, k, v, k, v, PartRows{dk, key_count, seq, kv_heads, head_dim},          \
                 PartRows{dv, key_count, seq, kv_heads, head_dim}},                              \
            Statistics{lse_log2, delta},                                                         \
            Sizes{counters, static_cast<int32>(queries), key_count, heads, kv_heads, batch,      \
                  section_heads, causal, scale, scale_log2},                                     \
            KeyHeads{first_head, head_count, {scores}}, SeenKeys{nullptr, 0, 0});                \
    }

#define QUERIES(name, ...)                                                                       \
    extern "C" __global__ void __launch_bounds__(kSumThreads, kSumCtas)                          \
        sm90_attention_part_backward_stored_queries_##name(                                      \
            const __grid_constant__ TensorMap k, float* dq, uint8* scores, uint32 queries,       \
            uint32 keys, uint32 seq, uint32 heads, uint32 kv_heads, uint32 head_dim,             \
            uint32 first_head, uint32 head_count, uint32 causal, float scale) {                  \
        const int32 query_count = static_cast<int32>(queries);                                   \
        sum_stored_scores<SumShape<true, __VA_ARGS__>>(                                          \
            memory, k, SumResults{k, PartRows{dq, query_count, seq, heads, head_dim}},           \
            Sizes{nullptr, query_count, static_cast<int32>(keys), heads, kv_heads, 0, 0, causal, \
                  scale, 0.0f},                                                                  \
            KeyHeads{first_head, head_count, {scores}});                                         \
    }

KEYS(d96, 96, 64, 2, 3)
KEYS(d128, 128, 64, 2, 3)
QUERIES(d96, 96, 3)
QUERIES(d128, 128, 3)
