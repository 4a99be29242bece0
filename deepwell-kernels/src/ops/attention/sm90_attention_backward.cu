// Gradients of attention (attention.cu) on wgmma: dq, dk and dv from dout, q, k, v, out and lse.
//
// dout, q, out, dq [batch * seq, heads * D], k, v, dk, dv [batch * seq, kv_heads * D] BF16, lse
// [batch, heads, seq] FP32; D as in sm90_attention.cu. With p = exp(scale q k^T - lse) and
// delta = sum(dout * out) by row:
//   dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale ds k,  dk = scale ds^T q.
//
// Three kernels: `rows` computes delta and lse in powers of two; `keys` computes dk and dv of a
// tile of 128 keys, over all queries of all heads that share the keys; `queries` computes dq of a
// tile of 128 queries, over all keys. The last two both compute p and ds: 7 GEMMs instead of 5. In
// return every gradient is summed by a single CTA in a fixed order, no gradient passes through
// memory in FP32 (with 5 GEMMs dq does, S^2 D 4 / 128 bytes per head, with CTAs taking turns), and
// ds never leaves registers.
//
// In `keys` and `queries` a CTA has a producer warpgroup and two consumer warpgroups. One thread of
// the producer takes tiles from a counter, the longest first, and issues the copies; the next tile
// is copied while the previous results are stored. A consumer has 64 rows of the tile, which are
// also the rows of its scores, so that p and ds are left operands in their register layout. The
// next wgmma are issued before the results of the previous wgmma are used: exponentials are
// overlapped with dout v^T, ds with p^T dout, and both with the other consumer's GEMMs.
//
// Budgets for D = 128, both consumers, with tensor cores at 4096 FLOP and shared memory at 128
// bytes per cycle; registers are per thread:
//               | of rows      | tensor | shared memory        | registers
//   keys        | 128 x 64     | 2048   | 1536 + 256 copied    | dk, dv 64 each, p, ds 32, 16 each
//   queries     | 128 x 128    | 3072   | 2048 + 512 copied    | dq 64, p, ds 64 and 32
// Exponentials, 16 per cycle, take 512 and 1024 cycles. With D = 64 the cycles of tensor cores and
// shared memory are half of these. Keys and values would then fit into registers, but ptxas 13.0
// assigns p and ds the registers of left operands that a loop of wgmma does not change.
//
// Kernels of `keys` and `queries` whose names end in `_extended` support windows and documents as
// in attention.cu. Sinks are included in lse; attention_backward.cu computes their gradients.
//
// architectures: sm_90a
#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_key_gradients.cuh"
#include "epilogue/sm90_attention_query_gradients.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_statistics.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// Tensors as at the top of this file, with `head_dim` elements per head; maps have boxes of 64
// elements of a head and of the rows of a tile or a stage (results: 64).
#define ROWS(name, lanes, rows)                                                                  \
    extern "C" __global__ void __launch_bounds__(kStatisticsThreads)                             \
        sm90_attention_backward_rows_##name(const bf16* dout, const bf16* out, const float* lse, \
                                            float* lse_log2, float* delta, uint32 seq,           \
                                            uint32 heads, uint32 head_dim) {                     \
        make_statistics<lanes, rows>(dout, out, lse, Statistics{lse_log2, delta}, seq, seq,      \
                                     heads, head_dim);                                           \
    }

#define KEYS_KERNEL(name, ends, is_extended, ...)                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_keys_##name##ends(                                               \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,          \
            float* lse_log2, float* delta, uint32* counters, uint32 seq, uint32 heads,           \
            uint32 kv_heads, uint32 batch, uint32 section_heads, uint32 causal, float scale,     \
            float scale_log2, uint32 window, const int32* documents) {                           \
        make_key_gradients<KeyShape<is_extended, false, false, __VA_ARGS__>>(                    \
            memory, Maps{dout, q, k, v, dk, dv}, Statistics{lse_log2, delta},                    \
            Sizes{counters, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads,   \
                  batch, section_heads, causal, scale, scale_log2},                              \
            KeyHeads{0, batch * kv_heads, {nullptr}},                                            \
            SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)});           \
    }

#define QUERIES_KERNEL(name, ends, is_extended, ...)                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_queries_##name##ends(                                            \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dq, float* lse_log2, float* delta,                 \
            uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch,           \
            uint32 section_heads, uint32 causal, float scale, float scale_log2, uint32 window,   \
            const int32* documents) {                                                            \
        make_query_gradients<QueryShape<is_extended, false, __VA_ARGS__>>(                       \
            memory, Maps{dout, q, k, v, dq, dq}, Statistics{lse_log2, delta},                    \
            Sizes{counters, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads,   \
                  batch, section_heads, causal, scale, scale_log2},                              \
            SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)});           \
    }

#define KEYS(name, ...)                                                                          \
    KEYS_KERNEL(name, , false, __VA_ARGS__)                                                      \
    KEYS_KERNEL(name, _extended, true, __VA_ARGS__)

#define QUERIES(name, ...)                                                                       \
    QUERIES_KERNEL(name, , false, __VA_ARGS__)                                                   \
    QUERIES_KERNEL(name, _extended, true, __VA_ARGS__)

// Lanes per row; rows of a CTA, few, so that the loads of a CTA overlap the sums of others.
ROWS(d64, 8, 64)
ROWS(d128, 16, 32)
// Elements of a head; queries or keys of a stage; number of tiles and of stages.
KEYS(d64_64, 64, 64, 2, 4)
KEYS(d96_64, 96, 64, 2, 3)
KEYS(d128_64, 128, 64, 2, 3)
QUERIES(d64_64, 64, 64, 2, 4)
QUERIES(d64_128, 64, 128, 2, 3)
QUERIES(d96_96, 96, 96, 2, 2)
QUERIES(d128_96, 128, 96, 2, 2)
QUERIES(d128_128, 128, 128, 1, 2)
