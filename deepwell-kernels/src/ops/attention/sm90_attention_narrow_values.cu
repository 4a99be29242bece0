// Attention on wgmma (sm90_attention.cu) where values are narrower than keys: keys of up to 192
// elements and values of up to 128.
//
// A block of values has the chunks of a block of keys, of which the last is beyond the values: the
// copies fill it with zeros, the GEMM of the sums does not read it, and the stores of results end
// at the values. Sums are 64 registers per thread, scores 48 and weights 24.
//
// architectures: sm_90a
#include "common/types.cuh"
#include "epilogue/sm90_attention_forward.cuh"
#include "ptx/tensor_copy_4d.cuh"

using namespace sm90_attention;

extern __shared__ __align__(1024) uint8 memory[];

// Rows of queries and keys in shared memory have `kKeyElements` elements, results `kValueElements`.
template <Takes kTakes, int kKeyElements, int kValueElements, int kConsumerCount, int kBlockKeys,
          int kTilesOfQueries>
struct NarrowValues : Shape<kTakes, kKeyElements, kConsumerCount, kBlockKeys, kTilesOfQueries> {
    static constexpr int kHeadDim = kValueElements;
    static_assert(kValueElements <= kKeyElements, "results are staged where queries were");
};

#define NARROW_VALUES(name, ...)                                                                 \
    extern "C" __global__ void __launch_bounds__(                                                \
        NarrowValues<Takes::kPlain, __VA_ARGS__>::kThreads, 1)                                   \
        sm90_attention_narrow_values_##name(                                                     \
            const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,            \
            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out,          \
            float* lse, uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads,             \
            uint32 batch_heads, uint32 section_heads, uint32 causal, float scale_log2) {         \
        attend<NarrowValues<Takes::kPlain, __VA_ARGS__>>(                                        \
            memory, Maps{q, k, v, out},                                                          \
            Arguments{lse, counters, static_cast<int32>(seq), static_cast<int32>(seq),           \
                      static_cast<int32>(seq), heads, kv_heads, batch_heads, section_heads,      \
                      causal, scale_log2, static_cast<int32>(seq), nullptr, nullptr});           \
    }                                                                                            \
    extern "C" __global__ void __launch_bounds__(                                                \
        NarrowValues<Takes::kExtended, __VA_ARGS__>::kThreads, 1)                                \
        sm90_attention_narrow_values_##name##_extended(                                          \
            const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,            \
            const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap out,          \
            float* lse, uint32* counters, uint32 seq, uint32 heads, uint32 kv_heads,             \
            uint32 batch_heads, uint32 section_heads, uint32 causal, float scale_log2,           \
            uint32 window, const float* sinks, const int32* documents) {                         \
        attend<NarrowValues<Takes::kExtended, __VA_ARGS__>>(                                     \
            memory, Maps{q, k, v, out},                                                          \
            Arguments{lse, counters, static_cast<int32>(seq), static_cast<int32>(seq),           \
                      static_cast<int32>(seq), heads, kv_heads, batch_heads, section_heads,      \
                      causal, scale_log2, static_cast<int32>(window), sinks, documents});        \
    }

// Elements of a key and of a value; consumers; keys of a block; tiles of queries.
NARROW_VALUES(d192, 192, 128, 2, 96, 1)
