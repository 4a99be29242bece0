// Gradients of attention to a part of the keys (attention_part_backward.cu) on wgmma, in the frame
// of sm90_attention_backward.cu, with results in FP32.
//
// dout, q [batch, rows, heads, D], k, v [batch, rows, kv_heads, D] BF16 through maps of the tokens
// that take part, as in sm90_attention_part.cu. dout, out, lse, dq, dk and dv of matrices of `seq`
// rows a sequence, from the first row that takes part on. sm90_attention_part.cu sets the rows of
// gradients of hidden queries and keys.
//
// architectures: sm_90a
#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "epilogue/sm90_attention_query_gradients.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_part_rows.cuh"
#include "mma/sm90_attention_statistics.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

#define ROWS(name, lanes, rows)                                                                  \
    extern "C" __global__ void __launch_bounds__(kStatisticsThreads)                             \
        sm90_attention_part_backward_rows_##name(                                                \
            const bf16* dout, const bf16* out, const float* lse, float* lse_log2, float* delta,  \
            uint32 queries, uint32 seq, uint32 heads, uint32 head_dim) {                         \
        make_statistics<lanes, rows>(dout, out, lse, Statistics{lse_log2, delta}, queries, seq,  \
                                     heads, head_dim);                                           \
    }

#define KEYS(name, ...)                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_part_backward_keys_##name(                                                \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, float* dk, \
            float* dv, float* lse_log2, float* delta, uint32* counters, uint32 queries,          \
            uint32 keys, uint32 seq, uint32 heads, uint32 kv_heads, uint32 head_dim,             \
            uint32 batch, uint32 section_heads, uint32 causal, float scale, float scale_log2) {  \
        const int32 key_count = static_cast<int32>(keys);                                        \
        make_key_gradients<KeyShape<false, true, false, __VA_ARGS__>>(                           \
            memory,                                                                              \
            Maps{dout, q, k, v, k, v, PartRows{dk, key_count, seq, kv_heads, head_dim},          \
                 PartRows{dv, key_count, seq, kv_heads, head_dim}},                              \
            Statistics{lse_log2, delta},                                                         \
            Sizes{counters, static_cast<int32>(queries), key_count, heads, kv_heads, batch,      \
                  section_heads, causal, scale, scale_log2},                                     \
            KeyHeads{0, batch * kv_heads, {nullptr}}, SeenKeys{nullptr, 0, 0});                  \
    }

#define QUERIES(name, ...)                                                                       \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_part_backward_queries_##name(                                             \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, float* dq, \
            float* lse_log2, float* delta, uint32* counters, uint32 queries, uint32 keys,        \
            uint32 seq, uint32 heads, uint32 kv_heads, uint32 head_dim, uint32 batch,            \
            uint32 section_heads, uint32 causal, float scale, float scale_log2) {                \
        const int32 query_count = static_cast<int32>(queries);                                   \
        make_query_gradients<QueryShape<false, true, __VA_ARGS__>>(                              \
            memory,                                                                              \
            Maps{dout, q, k, v, q, q, PartRows{dq, query_count, seq, heads, head_dim}},          \
            Statistics{lse_log2, delta},                                                         \
            Sizes{counters, query_count, static_cast<int32>(keys), heads, kv_heads, batch,       \
                  section_heads, causal, scale, scale_log2},                                     \
            SeenKeys{nullptr, 0, 0});                                                            \
    }

// As in sm90_attention_backward.cu.
ROWS(d64, 8, 64)
ROWS(d128, 16, 32)
KEYS(d64_64, 64, 64, 2, 4)
KEYS(d96_64, 96, 64, 2, 3)
KEYS(d128_64, 128, 64, 2, 3)
QUERIES(d64_128, 64, 128, 2, 3)
QUERIES(d96_96, 96, 96, 2, 2)
QUERIES(d128_96, 128, 96, 2, 2)
