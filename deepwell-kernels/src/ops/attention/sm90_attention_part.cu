// Attention of a rank's queries to the keys of one rank (context parallelism), on wgmma:
// attention_part.cu in the frame of sm90_attention.cu, with results in FP32.
//
// q [batch, rows, heads, D], k, v [batch, rows, kv_heads, D] BF16 through maps of the tokens that
// take part: the queries that see keys, and the keys that are seen. All of these queries see all of
// these keys, or, with `causal`, the keys up to their own position. out [batch, seq, heads, D], lse
// [batch, heads, seq] FP32, both from the first of these queries on. `hidden` sets the results of
// the other rows: zeros, and -inf as lse.
//
// architectures: sm_90a
#include "common/infinity.cuh"
#include "common/types.cuh"
#include "epilogue/sm90_attention_forward.cuh"
#include "mma/sm90_attention_part_rows.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

#define SM90_ATTENTION_PART(name, ...)                                                           \
    extern "C" __global__ void __launch_bounds__(Shape<Takes::kPart, __VA_ARGS__>::kThreads, 1)  \
        sm90_attention_part_##name(                                                              \
            const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,            \
            const __grid_constant__ TensorMap v, float* out, float* lse, uint32* counters,       \
            uint32 queries, uint32 keys, uint32 seq, uint32 heads, uint32 kv_heads,              \
            uint32 head_dim, uint32 batch_heads, uint32 section_heads, uint32 causal,            \
            float scale_log2) {                                                                  \
        attend<Shape<Takes::kPart, __VA_ARGS__>>(                                                \
            memory, Maps{q, k, v, q},                                                            \
            Arguments{lse, counters, static_cast<int32>(queries), static_cast<int32>(keys),      \
                      static_cast<int32>(seq), heads, kv_heads, batch_heads, section_heads,      \
                      causal, scale_log2, 0, nullptr, nullptr,                                   \
                      PartRows{out, static_cast<int32>(queries), seq, heads, head_dim}});        \
    }

SM90_ATTENTION_PART(d64, 64, 3, 128, 2)
SM90_ATTENTION_PART(d96, 96, 2, 128, 2)
SM90_ATTENTION_PART(d128, 128, 2, 128, 2)

constexpr int kHiddenThreads = 256;

// A CTA for each of `count` tokens of each sequence from token `first` on: zeros in one or two
// matrices [batch, seq, heads * D], and -inf in lse; null matrices are skipped.
extern "C" __global__ void __launch_bounds__(kHiddenThreads)
    sm90_attention_part_hidden(float* rows, float* more_rows, float* lse, uint32 first,
                               uint32 count, uint32 seq, uint32 heads, uint32 head_dim) {
    const uint32 batch = blockIdx.x / count;
    const uint32 token = first + blockIdx.x - batch * count;
    const uint32 quads = heads * head_dim / 4;
    const uint64 at = (static_cast<uint64>(batch) * seq + token) * quads;
    const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (uint32 quad = threadIdx.x; quad < quads; quad += kHiddenThreads) {
        reinterpret_cast<float4*>(rows)[at + quad] = zero;
        if (more_rows != nullptr) {
            reinterpret_cast<float4*>(more_rows)[at + quad] = zero;
        }
    }
    if (lse != nullptr) {
        for (uint32 head = threadIdx.x; head < heads; head += kHiddenThreads) {
            lse[(static_cast<uint64>(batch) * heads + head) * seq + token] = minus_infinity();
        }
    }
}
