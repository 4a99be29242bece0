// Causal or full attention with grouped query heads: out = softmax(scale q k^T) v and lse, the
// natural logarithm of each row's sum of exponentials.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// q, out [batch * seq, heads * D], k, v [batch * seq, kv_heads * D] BF16, lse [batch, heads, seq]
// FP32. Query head h reads key and value head h / (heads / kv_heads). D is a width that a kernel is
// compiled for; heads of fewer elements, whole units of 16 bytes, go through a kernel of the next
// width, whose tiles end in zeros.
//
// A CTA of four warps takes 128 queries of one head, a warp 32 of them, so that every operand
// that a warp reads of keys and values serves two GEMMs: with 16 rows a warp, reading shared memory
// would take longer than multiplying. Keys and values come by 64 in two buffers, the next ones
// copied while these are used, with one barrier each. Scores and weights never leave registers.
// Warps pass over chunks of keys that the mask hides from all of their queries and compare indices
// only in chunks that it cuts.
//
// Kernels that end in `_extended` take what a head may look at beside all keys: a window, the last
// `window` keys of those that the mask leaves, where blocks of keys before all windows of a tile
// are never copied; a sink of each head, a score like that of one more key whose value is zero;
// documents, [batch * seq, 2] int32, where the document of a token begins and ends in its sequence,
// of which a token sees its own alone, and blocks before all of a tile's are not copied either; and
// values of another width, [batch * seq, kv_heads * value_dim], as out is with `heads`. Keys of
// up to 192 elements have values of at most 128 there.
//
// Softmax is online, in powers of two. A row's sums are relative to a reference of its own, which
// moves up to the row's greatest score only when some score of the warp exceeds it by 2^8 or more:
// FP32 holds that with no loss, and after the first keys it hardly happens, which saves nearly all
// rescaling and the exchange of maxima between lanes.
#include "common/types.cuh"
#include "epilogue/attention_forward.cuh"

// `kName` is the end of the kernel's name.
#define DEEPWELL_ATTENTION(kName, kHeadDim, kPadded)                                             \
    extern "C" __global__ void __launch_bounds__(                                                \
        kThreads, Tiling<kHeadDim>::blocks_per_sm(kPadded))                                      \
        attention_##kName(const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse,    \
                          uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch_heads,         \
                          uint32 section_heads, uint32 causal, float scale_log2,                 \
                          uint32 head_dim) {                                                     \
        attend<kHeadDim, kPadded, false, false>(                                                 \
            Arguments<bf16>{q, k, v, out, lse, seq, heads, kv_heads, batch_heads, section_heads, \
                      causal, scale_log2, head_dim, head_dim, seq, nullptr, nullptr, {}});       \
    }

#define DEEPWELL_ATTENTION_EXTENDED(kHeadDim)                                                    \
    extern "C" __global__ void __launch_bounds__(                                                \
        kThreads, Tiling<kHeadDim>::blocks_per_sm(true))                                         \
        attention_d##kHeadDim##_extended(                                                        \
            const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, uint32 seq,      \
            uint32 heads, uint32 kv_heads, uint32 batch_heads, uint32 section_heads,             \
            uint32 causal, float scale_log2, uint32 head_dim, uint32 value_dim, uint32 window,   \
            const float* sinks, const int32* documents) {                                        \
        attend<kHeadDim, true, true, false>(                                                     \
            Arguments<bf16>{q, k, v, out, lse, seq, heads, kv_heads, batch_heads, section_heads, \
                      causal, scale_log2, head_dim, value_dim, window, sinks, documents, {}});   \
    }

DEEPWELL_ATTENTION(d16, 16, false)
DEEPWELL_ATTENTION(d32, 32, false)
DEEPWELL_ATTENTION(d64, 64, false)
DEEPWELL_ATTENTION(d64_padded, 64, true)
DEEPWELL_ATTENTION(d128, 128, false)
DEEPWELL_ATTENTION(d128_padded, 128, true)
DEEPWELL_ATTENTION_EXTENDED(64)
DEEPWELL_ATTENTION_EXTENDED(128)
DEEPWELL_ATTENTION_EXTENDED(192)
