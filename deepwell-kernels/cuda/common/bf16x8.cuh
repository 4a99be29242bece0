// Eight BF16 in 16 bytes, the unit in which element-wise kernels read and write memory.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ void unpack_bf16x8(uint4 packed, float (&values)[8]) {
    values[0] = low_to_f32(packed.x);
    values[1] = high_to_f32(packed.x);
    values[2] = low_to_f32(packed.y);
    values[3] = high_to_f32(packed.y);
    values[4] = low_to_f32(packed.z);
    values[5] = high_to_f32(packed.z);
    values[6] = low_to_f32(packed.w);
    values[7] = high_to_f32(packed.w);
}

__device__ __forceinline__ uint4 pack_bf16x8(const float (&values)[8]) {
    return make_uint4(to_bf16_pair(values[0], values[1]), to_bf16_pair(values[2], values[3]),
                      to_bf16_pair(values[4], values[5]), to_bf16_pair(values[6], values[7]));
}
