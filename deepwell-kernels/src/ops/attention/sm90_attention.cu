// Causal or full attention with grouped query heads on wgmma: out = softmax(scale q k^T) v and lse,
// the natural logarithm of each row's sum of exponentials.
//
// q, out [batch * seq, heads * D], k, v [batch * seq, kv_heads * D] BF16, lse [batch, heads, seq]
// FP32. Query head h reads key and value head h / (heads / kv_heads). Heads narrower than a
// kernel's width, in whole units of 16 bytes, are zero-padded in shared memory.
//
// A CTA has a producer warpgroup and consumer warpgroups. One thread of the producer takes tiles of
// queries from a counter, the longest first, and issues the copies: queries of up to two tiles,
// keys and values in stages of `kBlockN`, from the last visible block to the first. A consumer has
// 64 queries. It issues the scores of its next keys before the value sums of the previous keys, so
// that its softmax is overlapped with the sums on tensor cores. Consumers take turns to issue, so
// that the tensor cores multiply for one consumer while another computes exponentials. Weights
// never leave registers. The result is staged in the shared memory of the queries.
//
// Kernels whose names end in `_extended` support windows, sinks and documents as in attention.cu;
// blocks of keys before all windows or documents of a tile are not copied.
//
// Results do not depend on the assignment of tiles to CTAs: a tile's keys are summed in one order.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_attention_forward.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

#define SM90_ATTENTION(name, ...)                                                                \
    extern "C" __global__ void __launch_bounds__(Shape<Takes::kPlain, __VA_ARGS__>::kThreads, 1) \
        sm90_attention_##name(const __grid_constant__ TensorMap q,                               \
                              const __grid_constant__ TensorMap k,                               \
                              const __grid_constant__ TensorMap v,                               \
                              const __grid_constant__ TensorMap out, float* lse,                 \
                              uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads,       \
                              uint32 batch_heads, uint32 section_heads, uint32 causal,           \
                              float scale_log2) {                                                \
        attend<Shape<Takes::kPlain, __VA_ARGS__>>(                                               \
            memory, Maps{q, k, v, out},                                                          \
            Arguments{lse, counters, static_cast<int32>(seq), static_cast<int32>(seq),           \
                      static_cast<int32>(seq), heads, kv_heads, batch_heads, section_heads,      \
                      causal, scale_log2, static_cast<int32>(seq), nullptr, nullptr});           \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(                                                \
        Shape<Takes::kExtended, __VA_ARGS__>::kThreads, 1)                                       \
        sm90_attention_##name##_extended(                                                        \
            const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,            \
            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out,          \
            float* lse, uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads,             \
            uint32 batch_heads, uint32 section_heads, uint32 causal, float scale_log2,           \
            uint32 window, const float* sinks, const int32* documents) {                         \
        attend<Shape<Takes::kExtended, __VA_ARGS__>>(                                            \
            memory, Maps{q, k, v, out},                                                          \
            Arguments{lse, counters, static_cast<int32>(seq), static_cast<int32>(seq),           \
                      static_cast<int32>(seq), heads, kv_heads, batch_heads, section_heads,      \
                      causal, scale_log2, static_cast<int32>(window), sinks, documents});        \
    }

SM90_ATTENTION(d64, 64, 3, 128, 2)
SM90_ATTENTION(d96, 96, 2, 128, 2)
SM90_ATTENTION(d128, 128, 2, 128, 2)
SM90_ATTENTION(d256, 256, 2, 64, 1)
