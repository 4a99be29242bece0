// Gradients of attention (attention.cu): dq, dk and dv from dout, q, k, v, out and lse.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
//
// dout, q, out, dq [batch * seq, heads * D], k, v, dk, dv [batch * seq, kv_heads * D] BF16, lse
// [batch, heads, seq] FP32; D as in attention.cu. With p = exp(scale q k^T - lse) and
// delta = sum(dout * out) by row:
//   dv = p^T dout,  ds = p * (dout v^T - delta),  dq = scale ds k,  dk = scale ds^T q.
//
// One launch, three kinds of work, in the order in which CTAs take it from a counter:
//   1. rows:    delta and lse in powers of two, for some rows, into the workspace;
//   2. keys:    dk and dv of a tile of keys, over all queries of all heads that share them;
//   3. queries: dq of a tile of queries, over all keys.
// Kinds 2 and 3 each recompute p: 7 GEMMs instead of 5. In return every gradient is summed by a
// single CTA in a fixed order, and no gradient passes through memory in FP32. Kinds 2 and 3 begin
// when the rows are done. A CTA that waits took its work after all rows were taken by CTAs that run
// without waiting, so the wait ends however few CTAs are resident.
//
// Extended kernels are those of attention.cu. A sink's score has a value of zero, so its gradient
// is that of a score whose dp is zero; a separate launch sums it over all rows of a head.
#include "common/row_sum.cuh"
#include "common/types.cuh"
#include "epilogue/attention_backward.cuh"
#include "ptx/exp2.cuh"

constexpr int kSinkThreads = 512;

// dsinks[h] (+)= -sum of exp(sink - lse) delta over all rows of a head, in a fixed order, with one
// CTA per head. sinks, dsinks [heads], lse [batch, heads, seq]; deltas [batch, heads, delta_seq]
// FP32 with stride `delta_stride`.
extern "C" __global__ void __launch_bounds__(kSinkThreads)
    attention_backward_sinks(const float* sinks, const float* lse, const float* deltas,
                             float* dsinks, uint32 batch, uint32 heads, uint32 seq,
                             uint32 delta_seq, uint32 delta_stride, uint32 accumulate) {
    const uint32 head = blockIdx.x;
    const float sink = sinks[head];
    float sum = 0.0f;
    for (uint32 sequence = 0; sequence < batch; ++sequence) {
        const uint64 first = static_cast<uint64>(sequence) * heads + head;
        const float* of_lse = lse + first * seq;
        const float* of_deltas = deltas + first * delta_seq * delta_stride;
        for (uint32 row = threadIdx.x; row < seq; row += kSinkThreads) {
            const float weight = ex2((sink - of_lse[row]) * kLog2E);
            sum = fmaf(weight, of_deltas[static_cast<uint64>(row) * delta_stride], sum);
        }
    }
    sum = sum_of_cta<kSinkThreads>(sum);
    if (threadIdx.x == 0) {
        dsinks[head] = (accumulate != 0 ? dsinks[head] : 0.0f) - sum;
    }
}

// `kName` is the suffix of the kernel's name.
#define DEEPWELL_ATTENTION_BACKWARD(kName, kHeadDim, kPadded)                                    \
    extern "C" __global__ void __launch_bounds__(kThreads, 2) attention_backward_##kName(        \
        const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const bf16* out,          \
        const float* lse, bf16* dq, bf16* dk, bf16* dv, RowStatistics* statistics,               \
        uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch,               \
        uint32 key_section, uint32 query_section, uint32 causal, float scale, float scale_log2,  \
        uint32 head_dim) {                                                                       \
        differentiate<kHeadDim, kPadded, false, false>(AttentionGradients<bf16>{                 \
            dout, q, k, v, out, lse, dq, dk, dv, statistics, counters, seq, heads, kv_heads,     \
            batch, key_section, query_section, causal, scale, scale_log2, head_dim, head_dim,    \
            seq, nullptr, {}});                                                                  \
    }

#define DEEPWELL_ATTENTION_BACKWARD_EXTENDED(kHeadDim)                                           \
    extern "C" __global__ void __launch_bounds__(kThreads, 2)                                    \
        attention_backward_d##kHeadDim##_extended(                                               \
            const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const bf16* out,      \
            const float* lse, bf16* dq, bf16* dk, bf16* dv, RowStatistics* statistics,           \
            uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads, uint32 batch,           \
            uint32 key_section, uint32 query_section, uint32 causal, float scale,                \
            float scale_log2, uint32 head_dim, uint32 value_dim, uint32 window,                  \
            const int32* documents) {                                                            \
        differentiate<kHeadDim, true, true, false>(AttentionGradients<bf16>{                     \
            dout, q, k, v, out, lse, dq, dk, dv, statistics, counters, seq, heads, kv_heads,     \
            batch, key_section, query_section, causal, scale, scale_log2, head_dim, value_dim,   \
            window, documents, {}});                                                             \
    }

DEEPWELL_ATTENTION_BACKWARD(d16, 16, false)
DEEPWELL_ATTENTION_BACKWARD(d32, 32, false)
DEEPWELL_ATTENTION_BACKWARD(d64, 64, false)
DEEPWELL_ATTENTION_BACKWARD(d64_padded, 64, true)
DEEPWELL_ATTENTION_BACKWARD(d128, 128, false)
DEEPWELL_ATTENTION_BACKWARD(d128_padded, 128, true)
DEEPWELL_ATTENTION_BACKWARD_EXTENDED(64)
DEEPWELL_ATTENTION_BACKWARD_EXTENDED(128)
DEEPWELL_ATTENTION_BACKWARD_EXTENDED(192)
