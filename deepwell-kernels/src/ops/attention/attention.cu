// Causal or full attention with grouped query heads: out = softmax(scale q k^T) v and lse, the
// natural logarithm of each row's sum of exponentials.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// q, out [batch * seq, heads * D], k, v [batch * seq, kv_heads * D] BF16, lse [batch, heads, seq]
// FP32. Query head h reads key and value head h / (heads / kv_heads). D is a width that a kernel is
// compiled for; narrower heads, in whole units of 16 bytes, use a kernel of the next width with
// zero-padded tiles.
//
// A CTA of four warps computes 128 queries of one head, 32 per warp. Every operand of keys and
// values that a warp reads then serves two GEMMs: with 16 rows per warp, reading shared memory
// would take longer than multiplying. Keys and values are double-buffered in blocks of 64 (32 for
// width 192): the next block is copied while the current one is used, with one barrier per block.
// Scores and weights never leave registers. Warps skip chunks of keys that the mask hides from all
// of their queries, and compare indices only in chunks that the mask cuts.
//
// Kernels whose names end in `_extended` support four extensions: a window, the last `window` keys
// that the mask leaves visible (blocks of keys before all windows of a tile are never copied); a
// sink per head, a score like that of an additional key whose value is zero; documents, [batch *
// seq, 2] int32, the begin and end of a token's document within its sequence (a token sees only its
// own document, and blocks before all documents of a tile are not copied); and values of another
// width, [batch * seq, kv_heads * value_dim], with out [batch * seq, heads * value_dim]. Keys of up
// to 192 elements have values of at most 128 there.
//
// Softmax is online, in powers of two. A row's sums are relative to a reference of the row, which
// moves up to the row's greatest score only when some score of the warp exceeds its reference by
// 2^8 or more. FP32 holds this range without loss, and after the first keys such a move is rare,
// which saves nearly all rescaling and the exchange of maxima between lanes.
#include "common/types.cuh"
#include "epilogue/attention_forward.cuh"

// `kName` is the suffix of the kernel's name.
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
