// mma.sync: one warp multiplies two small matrices and accumulates in FP32.
//
// With g = lane / 4 and t = lane % 4, a thread holds these elements of the 16 x 8 result:
//   d[0], d[1]: row g,     columns 2t and 2t + 1
//   d[2], d[3]: row g + 8, the same columns.
// Operand registers have the layout of ldmatrix, see ptx/ldmatrix.cuh.
#pragma once

#include "common/types.cuh"

// d = a (16 x 16) b (16 x 8) + c, BF16 operands. d and c may be the same array.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

// d = a (16 x 32) b (32 x 8) + c, E4M3 operands, four to a word. Exists from sm_89 on.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                  uint32 b1, const float (&c)[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

// The same with an E8M0 scale for each row of a and each column of b, applied to the products
// before accumulation. Byte `kByte` of a_scales in lane 4g is the scale of row g, and in lane 4g +
// 1 the scale of row g + 8. Byte `kByte` of b_scales in lane 4g is the scale of column g. Other
// lanes and bytes are ignored. Exists on sm_120a only.
template <int kByte>
__device__ __forceinline__ void mma_m16n8k32_mxfp8(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                   uint32 b1, const float (&c)[4], uint32 a_scales,
                                                   uint32 b_scales) {
    // Each scale operand is followed by {byte, thread id: the lane, or pair of lanes, of each
    // four}.
    asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
        ".f32.e4m3.e4m3.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, "
        "%14, {%16, 0}, %15, {%16, 0};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]), "r"(a_scales), "r"(b_scales), "n"(kByte));
}

// d = a (16 x 64) b (64 x 8) + c, E2M1 operands, eight to a word, with a UE4M3 scale for each 16
// along K of each row of a and each column of b. a_scales in lane 4g has the four scales of row g,
// and in lane 4g + 1 those of row g + 8; b_scales in lane 4g those of column g. Other lanes are
// ignored. Exists on sm_120a only.
__device__ __forceinline__ void mma_m16n8k64_nvfp4(float (&d)[4], const uint32 (&a)[4], uint32 b0,
                                                   uint32 b1, const float (&c)[4], uint32 a_scales,
                                                   uint32 b_scales) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
        ".f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, "
        "%14, {0, 0}, %15, {0, 0};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]), "r"(a_scales), "r"(b_scales));
}
