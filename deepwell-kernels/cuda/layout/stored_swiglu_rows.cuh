// SwiGLU and its gradients from gate and up in MXFP8, with one scale per 32 elements of a row, as
// `Rows` and `Gradients` of the kernels that quantize them.
//
// A vector of a source, eight elements, is loaded as eight codes and eight scales: four are those
// of the row's 128 elements.
#pragma once

#include "common/activation.cuh"
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"
#include "layout/mx_value.cuh"
#include "layout/scale_tile.cuh"
#include "ptx/fp8.cuh"

// A matrix in MXFP8, quantized rowwise.
struct StoredMatrix {
    const uint8* __restrict__ data;
    const uint8* __restrict__ scales;

    // Eight scales, with those of the 128 elements around a place.
    __device__ __forceinline__ const uint8* scales_at(const ElementPlace& place,
                                                      uint32 columns) const {
        return scales + scale_tile_place(place.row, place.column, columns) +
               (scale_row_place(place.row % kScaleTileRows) & ~7u);
    }
    __device__ __forceinline__ uint4 load(const ElementPlace& place, uint32 columns) const {
        const uint2 codes = *reinterpret_cast<const uint2*>(data + place.of(columns));
        const uint2 of_rows = *reinterpret_cast<const uint2*>(scales_at(place, columns));
        return make_uint4(codes.x, codes.y, of_rows.x, of_rows.y);
    }
};

// Eight elements with a scale that BF16 may not hold. Not inlined, as such scales are rare.
__device__ __noinline__ float restored_rounded(uint32 code, uint32 scale) {
    return to_f32(to_bf16(e4m3_to_f32(code) * e8m0_to_f32(scale)));
}

// Eight codes with their scale in FP32, with the bits of `dequantize.cu` in BF16: products that
// BF16 holds are not rounded.
__device__ __forceinline__ void restore_vector(const uint2& codes, uint32 scale, float (&x)[8]) {
    if (scale == 255 || !holds_all(scale)) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32 word = i < 4 ? codes.x : codes.y;
            x[i] = restored_rounded(word >> i % 4 * 8 & 0xff, scale);
        }
        return;
    }
    const float factor = __uint_as_float(scale << 23);
    const float4 first = from_e4m3x4(codes.x), second = from_e4m3x4(codes.y);
    const float values[8] = {first.x, first.y, first.z, first.w,
                             second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] = values[i] * factor;
    }
}

// The scale of a vector as loaded, whose first element is at this place, or at a place of its tile.
__device__ __forceinline__ uint32 loaded_scale(const uint4& loaded, const ElementPlace& place) {
    const uint32 of_row = scale_row_place(place.row % kScaleTileRows) & 4 ? loaded.w : loaded.z;
    return of_row >> place.column % kScaleTileElements / kMxBlock * 8 & 0xff;
}

// Codes of eight elements, and their scale.
struct StoredVector {
    uint2 codes;
    uint32 scale;

    __device__ __forceinline__ StoredVector(const uint4& loaded, uint32 scale)
        : codes(make_uint2(loaded.x, loaded.y)), scale(scale) {}
    __device__ __forceinline__ StoredVector(const uint4& loaded, const ElementPlace& place)
        : StoredVector(loaded, loaded_scale(loaded, place)) {}
};

__device__ __forceinline__ GradientVectors stored_swiglu_gradients(const uint4& dout,
                                                                   const StoredVector& gate,
                                                                   const StoredVector& up) {
    float d[8], g[8], u[8];
    unpack_bf16x8(dout, d);
    restore_vector(gate.codes, gate.scale, g);
    restore_vector(up.codes, up.scale, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const SwigluGradients gradients = swiglu_gradients(d[j], g[j], u[j]);
        g[j] = gradients.gate;
        u[j] = gradients.up;
    }
    return {pack_bf16x8(g), pack_bf16x8(u)};
}

__device__ __forceinline__ GradientVectors stored_swiglu_gradients(const PairSources& sources,
                                                                   const ElementPlace& place) {
    return stored_swiglu_gradients(sources.dout, StoredVector(sources.gate, place),
                                   StoredVector(sources.up, place));
}

__device__ __forceinline__ uint4 stored_swiglu(const uint4& gate, const uint4& up,
                                               const ElementPlace& place) {
    const StoredVector of_gate(gate, place), of_up(up, place);
    float g[8], u[8];
    restore_vector(of_gate.codes, of_gate.scale, g);
    restore_vector(of_up.codes, of_up.scale, u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        g[j] = swiglu(g[j], u[j]);
    }
    return pack_bf16x8(g);
}

// `Rows` of `layout/row_quantize.cuh`.
struct StoredSwigluValues : PlainRows {
    static constexpr int kTogether = 4;
    struct Loaded {
        uint4 gate;
        uint4 up;
    };
    StoredMatrix gate;
    StoredMatrix up;
    uint32 columns;

    __device__ __forceinline__ StoredSwigluValues(const StoredMatrix& gate, const StoredMatrix& up,
                                                  uint32 columns)
        : gate(gate), up(up), columns(columns) {}

    __device__ __forceinline__ Loaded load(uint32, const ElementPlace& place) const {
        return {gate.load(place, columns), up.load(place, columns)};
    }
    // Tiles of elements are those of scales.
    __device__ __forceinline__ uint4 result(const Loaded& loaded, uint32 in_tile) const {
        return stored_swiglu(loaded.gate, loaded.up, ElementPlace{in_tile, mx_plain_column()});
    }
};

// `Gradients` of `layout/gradient_pair_quantize.cuh`.
struct StoredSwigluRows : PlainRows {
    const bf16* __restrict__ dout;
    StoredMatrix gate;
    StoredMatrix up;
    uint32 columns;

    __device__ __forceinline__ StoredSwigluRows(const bf16* dout, const StoredMatrix& gate,
                                                const StoredMatrix& up, uint32 columns)
        : dout(dout), gate(gate), up(up), columns(columns) {}

    __device__ __forceinline__ PairSources load(uint32, const ElementPlace& place) const {
        return {load_vector(dout, place, columns), gate.load(place, columns),
                up.load(place, columns)};
    }
    __device__ __forceinline__ GradientVectors result(const ElementPlaces&,
                                                      const PairSources& sources,
                                                      uint32 in_tile) const {
        return stored_swiglu_gradients(sources, ElementPlace{in_tile, mx_plain_column()});
    }
};
