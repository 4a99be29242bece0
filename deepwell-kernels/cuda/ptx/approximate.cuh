// Approximate reciprocals of the special function unit.
#pragma once

// 1 / x, within one unit in the last place; subnormal numbers count as zero.
__device__ __forceinline__ float rcp_approx(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

// 1 / sqrt(x), within two units in the last place; subnormal numbers count as zero.
__device__ __forceinline__ float rsqrt_approx(float x) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
