// Gradients of attention (attention.cu) with wide heads on wgmma, with five GEMMs: heads of 136 to
// 256 elements, and keys of up to 192 elements with values of up to 128. Notation as in
// sm90_attention_backward.cu.
//
// `rows` computes delta and lse in powers of two. `keys` computes dk and dv of a tile of 64 keys
// and stores ds of the tile in BF16. `queries` computes dq = scale ds k. Every sum has one CTA and
// a fixed order, so results do not depend on timing. The host launches `keys` and `queries` by
// turns for some heads, so that memory for ds is bounded.
//
// In sm90_attention_backward_stored.cu a consumer has 64 keys and sums dk and dv of these, which
// for 256 elements are 256 registers per thread. Here both consumers of `keys` have the same 64
// keys: one computes s = k q^T, p and dv += p dout, the other computes v dout^T, ds and dk += ds q.
// Each has the sums of one gradient, and both have equally many operations for any widths of keys
// and values. p and ds are left operands in registers. p passes from one consumer to the other in
// FP32. The consumer of p is up to two blocks ahead, so that its exponentials are overlapped with
// the other consumer's GEMMs. A split of each GEMM over both consumers, by queries (N = 32) or by
// columns, would read the left operands twice, 2304 cycles of shared memory in place of the 1536
// below, and pass both p and ds.
//
// Budget of `keys` for 64 keys and 64 queries of 256 elements, with tensor cores at 4096 FLOP and
// shared memory at 128 bytes per cycle: 2048 cycles of tensor cores; of shared memory 1536 cycles
// for operands, 256 to pass p, 512 for copies, 64 KiB from the L2 cache. Exponentials take 256
// cycles. A thread has 128 registers of sums, 32 of p or ds, 32 of statistics or p, and 16 of the
// left operand. `queries` reads 16 KiB of ds and 32 KiB of keys for 128 x 64 scores, for which
// tensor cores take 1024 cycles.
//
// Kernels of `keys` and `queries` whose names end in `_extended` support windows and documents as
// in attention.cu. Sinks are included in lse; attention_backward.cu computes their gradients.
//
// architectures: sm_90a
#include "ptx/wgmma_bf16_192.cuh"

#include "common/seen_keys.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_wide_key_gradients.cuh"
#include "epilogue/sm90_attention_wide_query_gradients.cuh"
#include "layout/score_gradients.cuh"
#include "mma/sm90_attention_backward_frame.cuh"
#include "mma/sm90_attention_statistics.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// Tensors and maps as in sm90_attention_backward.cu; `value_dim` is the width of out and dout.
// `scores` is memory for the query heads of `head_count` key heads from `first_head` on, counted
// over all sequences; `band` is that of layout/score_gradients.cuh.
extern "C" __global__ void __launch_bounds__(kStatisticsThreads)
    sm90_attention_backward_wide_rows(const bf16* dout, const bf16* out, const float* lse,
                                      float* lse_log2, float* delta, uint32 seq, uint32 heads,
                                      uint32 value_dim) {
    make_statistics<32, 32>(dout, out, lse, Statistics{lse_log2, delta}, seq, seq, heads,
                            value_dim);
}

#define KEYS_KERNEL(name, ends, is_extended, ...)                                                \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                    \
        sm90_attention_backward_wide_keys_##name##ends(                                          \
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap q,         \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,            \
            const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,          \
            float* lse_log2, float* delta, uint8* scores, uint32* counters, uint32 seq,          \
            uint32 heads, uint32 kv_heads, uint32 batch, uint32 first_head, uint32 head_count,   \
            uint32 section_heads, uint32 band, uint32 causal, float scale, float scale_log2,     \
            uint32 window, const int32* documents) {                                             \
        make_wide_key_gradients<WideKeyShape<is_extended, __VA_ARGS__>>(                         \
            memory, Maps{dout, q, k, v, dk, dv}, Statistics{lse_log2, delta},                    \
            Sizes{counters, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads,   \
                  batch, section_heads, causal, scale, scale_log2},                              \
            WideHeads{first_head, head_count,                                                    \
                      {scores, (seq + kTileRows - 1) / kTileRows, band, causal}},                \
            SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)});           \
    }

#define QUERIES_KERNEL(name, ends, is_extended, ...)                                             \
    extern "C" __global__ void __launch_bounds__(kSumThreads, 1)                                 \
        sm90_attention_backward_wide_queries_##name##ends(                                       \
            const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap dq,           \
            uint8* scores, uint32 seq, uint32 heads, uint32 kv_heads, uint32 first_head,         \
            uint32 head_count, uint32 band, uint32 causal, float scale, uint32 window,           \
            const int32* documents) {                                                            \
        sum_wide_scores<WideSumShape<is_extended, __VA_ARGS__>>(                                 \
            memory, k, dq,                                                                       \
            Sizes{nullptr, static_cast<int32>(seq), static_cast<int32>(seq), heads, kv_heads, 0, \
                  0, causal, scale, 0.0f},                                                       \
            WideHeads{first_head, head_count,                                                    \
                      {scores, (seq + kTileRows - 1) / kTileRows, band, causal}},                \
            SeenKeys{documents, static_cast<int32>(seq), static_cast<int32>(window)});           \
    }

#define KEYS(name, ...)                                                                          \
    KEYS_KERNEL(name, , false, __VA_ARGS__)                                                      \
    KEYS_KERNEL(name, _extended, true, __VA_ARGS__)

#define QUERIES(name, ...)                                                                       \
    QUERIES_KERNEL(name, , false, __VA_ARGS__)                                                   \
    QUERIES_KERNEL(name, _extended, true, __VA_ARGS__)

// Elements of a key and of a value; number of stages.
KEYS(d192_128, 192, 128, 3)
KEYS(d192_192, 192, 192, 3)
KEYS(d256_256, 256, 256, 2)
// Elements of a key; number of stages.
QUERIES(d192, 192, 5)
QUERIES(d256, 256, 4)
