// Conversions to and from eight-bit floats.
#pragma once

#include "common/types.cuh"

// Four FP32 as E4M3, first in the lowest byte: rounded to nearest even, saturating at 448, NaN of
// either sign as 0x7F.
__device__ __forceinline__ uint32 to_e4m3x4(float a, float b, float c, float d) {
    uint16 low, high;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
    return static_cast<uint32>(low) | static_cast<uint32>(high) << 16;
}

// Four E4M3, first in the lowest byte, as FP32: exact.
__device__ __forceinline__ float4 from_e4m3x4(uint32 codes) {
    uint32 low, high;  // two FP16 each
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(low) : "h"(static_cast<uint16>(codes)));
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(high) : "h"(static_cast<uint16>(codes >> 16)));
    float4 values;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(low));
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(values.z), "=f"(values.w)
        : "r"(high));
    return values;
}
