// AdamW over a chunk of a parameter with moments in eight bits, for masters of any type.
//
// A warp has blocks of 128 elements, a lane four elements of each, so that a shuffle finds the
// scale of the new moments. All loads of a thread are in flight before the first value is used.
#pragma once

#include "common/adamw.cuh"
#include "layout/adamw_fp8.cuh"
#include "layout/adamw_roots.cuh"
#include "common/types.cuh"

constexpr uint32 kChunkThreads = 256;
constexpr uint32 kChunkQuads = 4;                          // of a thread
constexpr uint32 kChunkStride = 4 * kChunkThreads;         // elements from a quad to the next
constexpr uint32 kChunk = kChunkQuads * kChunkStride;      // elements
constexpr uint32 kChunkStrideBytes = kChunkStride / kMomentBlock * kMomentBlockBytes;

// Loads up to four numbers; the others are zero.
__device__ __forceinline__ float4 load_quad(const float* x, uint64 count) {
    if (count >= 4) {
        return *reinterpret_cast<const float4*>(x);
    }
    return make_float4(count > 0 ? x[0] : 0.0f, count > 1 ? x[1] : 0.0f, count > 2 ? x[2] : 0.0f,
                       0.0f);
}

// Updates quads of a thread, `at` the first. `kIsWhole`: none has fewer than four elements.
template <uint32 kQuads, bool kIsWhole, typename Masters>
__device__ __forceinline__ void update_quads(const float* gradient, uint8* first, uint8* second,
                                             const Masters& masters, uint64 at, uint64 elements,
                                             uint32 index, float decay,
                                             const AdamwCoefficients& c) {
    const uint32 lane = threadIdx.x % 32;
    first += at / kMomentBlock * kMomentBlockBytes;
    second += at / kMomentBlock * kMomentBlockBytes;
    const auto count_of = [at, elements](uint32 quad) -> uint64 {
        const uint64 begin = at + quad * kChunkStride;
        return kIsWhole ? 4 : begin < elements ? elements - begin : 0;
    };
    float4 g[kQuads];
    typename Masters::Stored stored[kQuads];
    MomentQuad of_first[kQuads], of_second[kQuads];
#pragma unroll
    for (uint32 i = 0; i < kQuads; ++i) {
        g[i] = load_quad(gradient + at + i * kChunkStride, count_of(i));
        stored[i] = masters.load(at + i * kChunkStride, count_of(i));
        of_first[i] = moment_load(first + i * kChunkStrideBytes, lane);
        of_second[i] = moment_load(second + i * kChunkStrideBytes, lane);
    }
#pragma unroll
    for (uint32 i = 0; i < kQuads; ++i) {
        float4 w = Masters::widen(stored[i]);
        float4 m = moment_decode(of_first[i]);
        float4 v = moment_squares(moment_decode(of_second[i]));
        const float4 root = adamw_update_with_roots(g[i], w, m, v, decay, c);
        const uint64 begin = at + i * kChunkStride;
        moments_store(first + i * kChunkStrideBytes, second + i * kChunkStrideBytes, lane, m, root,
                      begin / 4, index, c.step);
        masters.store(begin, w, count_of(i), index, c.step);
    }
}

// Updates a chunk of a parameter of `elements` elements; `chunk` counts from its first.
template <typename Masters>
__device__ __forceinline__ void adamw_fp8_chunk(const float* gradient, uint8* first, uint8* second,
                                                const Masters& masters, uint64 chunk,
                                                uint64 elements, uint32 index, float decay,
                                                const AdamwCoefficients& c) {
    const uint64 at = chunk * kChunk + threadIdx.x * 4;
    if ((chunk + 1) * kChunk <= elements) {
        update_quads<kChunkQuads, true>(gradient, first, second, masters, at, elements, index,
                                        decay, c);
        return;
    }
#pragma unroll 1
    for (uint32 i = 0; i < kChunkQuads; ++i) {
        const uint64 begin = at + i * kChunkStride;
        if (begin / kMomentBlock * kMomentBlock >= elements) {
            return;  // the whole warp
        }
        update_quads<1, false>(gradient, first, second, masters, begin, elements, index, decay, c);
    }
}
