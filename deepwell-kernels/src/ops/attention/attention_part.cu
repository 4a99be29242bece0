// Attention of a rank's queries to the keys of one rank (context parallelism): as attention.cu,
// with results in FP32, which merge_attention.cu merges over all ranks' keys.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// q [batch * seq, heads * D], k, v [batch * seq, kv_heads * D] BF16, out [batch * seq, heads * D],
// lse [batch, heads, seq] FP32, D a width that a kernel is compiled for; extended kernels support
// narrower heads, values of another width, `sinks` [heads] or null, and windows. Queries before
// `first_query` see no key: their rows are zeros, with -inf as lse (with the sink's score as lse,
// if there are sinks). The other queries see the keys before `keys` and, with `causal`, of these
// only the keys up to their own position; with `window`, see common/seen_part.cuh. Tiles of queries
// that see nothing copy at most one stage of keys.
#include "common/seen_part.cuh"
#include "common/types.cuh"
#include "epilogue/attention_forward.cuh"

// `kName` is the suffix of the kernel's name.
#define DEEPWELL_ATTENTION_PART(kName, kHeadDim, kPadded, kExtended)                             \
    extern "C" __global__ void __launch_bounds__(                                                \
        kThreads, Tiling<kHeadDim>::blocks_per_sm(kPadded))                                      \
        attention_part_##kName(                                                                  \
            const bf16* q, const bf16* k, const bf16* v, float* out, float* lse, uint32 seq,     \
            uint32 heads, uint32 kv_heads, uint32 batch_heads, uint32 section_heads,             \
            uint32 causal, float scale_log2, uint32 head_dim, uint32 value_dim,                  \
            const float* sinks, int32 first_query, int32 keys, int32 window, int32 query_low,    \
            int32 query_high, int32 key_low, int32 key_high) {                                   \
        attend<kHeadDim, kPadded, kExtended, true>(Arguments<float>{                             \
            q, k, v, out, lse, seq, heads, kv_heads, batch_heads, section_heads, causal,         \
            scale_log2, head_dim, value_dim, seq, sinks, nullptr,                                \
            SeenPart{first_query, keys, window, query_low, query_high, key_low, key_high}});     \
    }

DEEPWELL_ATTENTION_PART(d16, 16, false, false)
DEEPWELL_ATTENTION_PART(d32, 32, false, false)
DEEPWELL_ATTENTION_PART(d64, 64, false, false)
DEEPWELL_ATTENTION_PART(d128, 128, false, false)
DEEPWELL_ATTENTION_PART(d64_extended, 64, true, true)
DEEPWELL_ATTENTION_PART(d128_extended, 128, true, true)
DEEPWELL_ATTENTION_PART(d192_extended, 192, true, true)
