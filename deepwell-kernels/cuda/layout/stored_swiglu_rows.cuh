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
#include "ptx/packed.cuh"

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

// Two codes, in the lower bytes of both halves, as BF16, times 2^-120.
__device__ __forceinline__ uint32 stored_pair(uint32 codes) {
    // Exponent and fraction are at the positions of a BF16; the biases differ by 120.
    return (codes & 0x00800080u) << 8 | (codes & 0x007f007fu) << 4;
}

// Four codes with NaN among them. Not inlined, as NaN is rare.
__device__ __noinline__ uint2 restored_with_nan(uint32 codes, uint32 scale) {
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[i] = e4m3_to_f32(codes >> 8 * i & 0xff) * e8m0_to_f32(scale);
    }
    return make_uint2(to_bf16_pair(values[0], values[1]), to_bf16_pair(values[2], values[3]));
}

// Four codes with a scale as BF16, each rounded once: the bits of `dequantize.cu`.
__device__ __forceinline__ uint2 restored_word(uint32 codes, uint32 scale) {
    if (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) {
        return restored_with_nan(codes, scale);
    }
    constexpr uint32 kBias = 0x7b807b80u;  // 2^120 twice
    const uint32 factor = __byte_perm(__float_as_uint(e8m0_to_f32(scale)), 0, 0x3232);
    const uint32 low = stored_pair(__byte_perm(codes, 0, 0x4140));
    const uint32 high = stored_pair(__byte_perm(codes, 0, 0x4342));
    return make_uint2(multiply_bf16x2(multiply_bf16x2(low, kBias), factor),
                      multiply_bf16x2(multiply_bf16x2(high, kBias), factor));
}

// A vector as loaded, whose first element is at this place, or at a place of its scale tile.
__device__ __forceinline__ uint4 restored_vector(const uint4& loaded, const ElementPlace& place) {
    const uint32 of_row = scale_row_place(place.row % kScaleTileRows) & 4 ? loaded.w : loaded.z;
    const uint32 scale = of_row >> place.column % kScaleTileElements / kMxBlock * 8 & 0xff;
    const uint2 first = restored_word(loaded.x, scale);
    const uint2 second = restored_word(loaded.y, scale);
    return make_uint4(first.x, first.y, second.x, second.y);
}

__device__ __forceinline__ GradientVectors stored_swiglu_gradients(
    const PairSources& sources, const ElementPlace& place) {
    float d[8], g[8], u[8];
    unpack_bf16x8(sources.dout, d);
    unpack_bf16x8(restored_vector(sources.gate, place), g);
    unpack_bf16x8(restored_vector(sources.up, place), u);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const SwigluGradients gradients = swiglu_gradients(d[j], g[j], u[j]);
        g[j] = gradients.gate;
        u[j] = gradients.up;
    }
    return {pack_bf16x8(g), pack_bf16x8(u)};
}

__device__ __forceinline__ uint4 stored_swiglu(const uint4& gate, const uint4& up,
                                               const ElementPlace& place) {
    float g[8], u[8];
    unpack_bf16x8(restored_vector(gate, place), g);
    unpack_bf16x8(restored_vector(up, place), u);
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
