// Conversions to eight-bit floats.
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
