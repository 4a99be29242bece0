// Gradients of attention to a part of the keys (attention_part.cu): the contributions of a rank's
// queries and one rank's keys to each other's gradients, as attention_backward.cu, in FP32.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// dout, q, k, v, out BF16 and lse FP32 as in attention_backward.cu, with out and lse of attention
// to all keys; dq, dk, dv FP32 of the shapes of q, k, v. `first_query`, `keys` and `window` as in
// attention_part.cu: hidden rows and keys get zeros.
#include "common/seen_part.cuh"
#include "common/types.cuh"
#include "epilogue/attention_backward.cuh"

// `kName` is the suffix of the kernel's name.
#define DEEPWELL_ATTENTION_PART_BACKWARD(kName, kHeadDim, kPadded, kExtended)                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        attention_part_backward_##kName(                                                         \
            const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const bf16* out,      \
            const float* lse, float* dq, float* dk, float* dv, RowStatistics* statistics,        \
            uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch,           \
            uint32 key_section, uint32 query_section, uint32 causal, float scale,                \
            float scale_log2, uint32 head_dim, uint32 value_dim, int32 first_query, int32 keys,  \
            int32 window, int32 query_low, int32 query_high, int32 key_low, int32 key_high) {    \
        differentiate<kHeadDim, kPadded, kExtended, true>(AttentionGradients<float>{             \
            dout, q, k, v, out, lse, dq, dk, dv, statistics, counters, seq, heads, kv_heads,     \
            batch, key_section, query_section, causal, scale, scale_log2, head_dim, value_dim,   \
            seq, nullptr,                                                                        \
            SeenPart{first_query, keys, window, query_low, query_high, key_low, key_high}});     \
    }

DEEPWELL_ATTENTION_PART_BACKWARD(d16, 16, false, false)
DEEPWELL_ATTENTION_PART_BACKWARD(d32, 32, false, false)
DEEPWELL_ATTENTION_PART_BACKWARD(d64, 64, false, false)
DEEPWELL_ATTENTION_PART_BACKWARD(d128, 128, false, false)
DEEPWELL_ATTENTION_PART_BACKWARD(d64_extended, 64, true, true)
DEEPWELL_ATTENTION_PART_BACKWARD(d128_extended, 128, true, true)
DEEPWELL_ATTENTION_PART_BACKWARD(d192_extended, 192, true, true)
