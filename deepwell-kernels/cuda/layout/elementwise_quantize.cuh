// Elementwise function of one, two or three matrices, fused with block quantization of the result.
// Each source is read once; the unquantized result is written only if another op reads it.
#pragma once

#include "layout/row_quantize.cuh"

// Rows `function(elements of the sources)`; `Rows` of `layout/row_quantize.cuh`.
template <int kSources, typename Function>
struct ElementwiseRows : PlainRows {
    static constexpr int kTogether = 4;
    struct Loaded {
        uint4 of_source[kSources];
    };
    const bf16* const (&sources)[kSources];
    uint32 columns;
    const Function& function;

    __device__ __forceinline__ ElementwiseRows(const bf16* const (&sources)[kSources],
                                               uint32 columns, const Function& function)
        : sources(sources), columns(columns), function(function) {}

    __device__ __forceinline__ Loaded load(uint32, const ElementPlace& place) const {
        Loaded loaded;
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
            loaded.of_source[s] = load_vector(sources[s], place, columns);
        }
        return loaded;
    }
    __device__ __forceinline__ uint4 result(const Loaded& loaded, uint32) const {
        float values[kSources][8];
#pragma unroll
        for (int s = 0; s < kSources; ++s) {
            unpack_bf16x8(loaded.of_source[s], values[s]);
        }
        float results[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float of_element[kSources];
#pragma unroll
            for (int s = 0; s < kSources; ++s) {
                of_element[s] = values[s][j];
            }
            results[j] = function(of_element);
        }
        return pack_bf16x8(results);
    }
};

// Quantizes `function(elements of the sources)`; `result` may be null. Arguments as `row_quantize`.
template <bool kRow, bool kColumn, int kSources, typename Function>
__device__ __forceinline__ void elementwise_quantize(const bf16* const (&sources)[kSources],
                                                     bf16* result, const MxTarget& to,
                                                     uint32 flags, MxTotals* totals,
                                                     uint64* statistics,
                                                     const Function& function) {
    row_quantize<kRow, kColumn>(
        ElementwiseRows<kSources, Function>(sources, to.columns, function), 0, result, to, flags,
        totals, statistics);
}
