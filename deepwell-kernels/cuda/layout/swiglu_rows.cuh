// SwiGLU gradients as `Gradients` of the kernels that quantize them.
#pragma once

#include "common/activation.cuh"
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/gradient_pair_quantize.cuh"

// `Gradients` of `layout/gradient_pair_quantize.cuh`.
struct SwigluRows : PlainRows {
    const bf16* __restrict__ dout;
    const bf16* __restrict__ gate;
    const bf16* __restrict__ up;
    uint32 columns;

    __device__ __forceinline__ SwigluRows(const bf16* dout, const bf16* gate, const bf16* up,
                                          uint32 columns)
        : dout(dout), gate(gate), up(up), columns(columns) {}

    __device__ __forceinline__ PairSources load(uint32, const ElementPlace& place) const {
        return {load_vector(dout, place, columns), load_vector(gate, place, columns),
                load_vector(up, place, columns)};
    }
    __device__ __forceinline__ GradientVectors result(const ElementPlaces&,
                                                      const PairSources& sources,
                                                      uint32) const {
        float d[8], g[8], u[8];
        unpack_bf16x8(sources.dout, d);
        unpack_bf16x8(sources.gate, g);
        unpack_bf16x8(sources.up, u);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const SwigluGradients gradients = swiglu_gradients(d[j], g[j], u[j]);
            g[j] = gradients.gate;
            u[j] = gradients.up;
        }
        return {pack_bf16x8(g), pack_bf16x8(u)};
    }
};
