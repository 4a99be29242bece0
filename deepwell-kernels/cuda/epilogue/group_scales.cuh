// The factors of the sums of grouped GEMMs whose operands have an FP32 scale for each group.
#pragma once

#include "common/types.cuh"

// The scales of each group of both operands, [groups] each.
struct GroupScales {
    const float* a;
    const float* b;

    __device__ __forceinline__ float product(int32 group) const {
        return __fmul_rn(__ldg(a + group), __ldg(b + group));
    }
};
