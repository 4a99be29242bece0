// Rotary position embedding or its backward, with block quantization of the result to MXFP8: data
// and scales along rows, down columns, or both, and their counters. The result has the bits of
// `rope.cu`; `layout/row_quantize.cuh` documents how the work is divided.
//
// A thread reads a vector and the paired vector half a head away, which another thread of the CTA
// also reads. A head of at most 128 elements is inside the tile, so that memory is read once.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/bf16x8.cuh"
#include "common/types.cuh"
#include "layout/row_quantize.cuh"

// Implements `Rows` of `layout/row_quantize.cuh`. x [rows, heads, 2, half], half a multiple of 8;
// table [positions, 2, half] FP32, cosines then sines.
struct RopeRows : PlainRows {
    static constexpr int kTogether = 4;
    struct Loaded {
        uint4 own;
        uint4 other;
        uint32 unit;  // first pair of the vector
        bool is_high;
    };
    const bf16* __restrict__ x;
    const float* __restrict__ table;
    uint32 columns;
    uint32 positions;
    uint32 half;
    float direction;
    uint32 row0 = 0;  // first row of the tile

    __device__ __forceinline__ RopeRows(const bf16* x, const float* table, uint32 columns,
                                        uint32 positions, uint32 half, float direction)
        : x(x),
          table(table),
          columns(columns),
          positions(positions),
          half(half),
          direction(direction) {}

    // Called for one tile only: the launch has one CTA per tile.
    __device__ __forceinline__ void begin(const ElementPlaces& first, const ElementPlaces&) {
        row0 = first.row0;
    }

    __device__ __forceinline__ Loaded load(uint32, const ElementPlace& place) const {
        Loaded loaded;
        const uint32 in_head = place.column % (2 * half);
        loaded.is_high = in_head >= half;
        loaded.unit = loaded.is_high ? in_head - half : in_head;
        const uint32 other = loaded.is_high ? place.column - half : place.column + half;
        loaded.own = load_vector(x, place, columns);
        loaded.other = load_vector(x, ElementPlace{place.row, other}, columns);
        return loaded;
    }

    __device__ __forceinline__ uint4 result(const Loaded& loaded, uint32 in_tile) const {
        const uint32 position = (row0 + in_tile) % positions;
        const float* const cosines =
            table + static_cast<uint64>(position) * (2 * half) + loaded.unit;
        // low cos - high sin, and high cos + low sin: each product is rounded separately.
        const float sign = loaded.is_high ? direction : -direction;
        float own[8], other[8];
        unpack_bf16x8(loaded.own, own);
        unpack_bf16x8(loaded.other, other);
#pragma unroll
        for (int quad = 0; quad < 2; ++quad) {
            const float4 c = *reinterpret_cast<const float4*>(cosines + 4 * quad);
            const float4 s = *reinterpret_cast<const float4*>(cosines + half + 4 * quad);
            const float cosine[4] = {c.x, c.y, c.z, c.w};
            const float sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = 4 * quad + i;
                own[j] = __fadd_rn(__fmul_rn(own[j], cosine[i]),
                                   __fmul_rn(other[j], sine[i] * sign));
            }
        }
        return pack_bf16x8(own);
    }
};

// x, y [rows, columns], 16-byte aligned; y may be null. Outputs as in `MxTarget`; statistics [6];
// the others as in `RopeRows`. One CTA per tile, at least one.
#define ROPE_KERNEL(name, row, column)                                                           \
    extern "C" __global__ void __launch_bounds__(ElementTile::kThreads, 3)                       \
        name(const bf16* __restrict__ x, bf16* __restrict__ y, uint8* __restrict__ data,         \
             uint8* __restrict__ scales, uint8* __restrict__ data_t,                             \
             uint8* __restrict__ scales_t, uint32 rows, uint32 columns, uint32 flags,            \
             MxTotals* totals, uint64* statistics, const float* __restrict__ table,              \
             uint32 positions, uint32 half, float direction) {                                   \
        const MxTarget to = {data, scales, data_t, scales_t, rows, columns};                     \
        row_quantize<row, column>(RopeRows(x, table, columns, positions, half, direction), 0, y, \
                                  to, flags, totals, statistics);                                \
    }

ROPE_KERNEL(rope_quantize_row, true, false)
ROPE_KERNEL(rope_quantize_column, false, true)
ROPE_KERNEL(rope_quantize_both, true, true)
