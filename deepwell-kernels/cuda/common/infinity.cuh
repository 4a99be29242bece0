// Infinity, without a header of the toolkit.
#pragma once

#include "common/types.cuh"

__device__ __forceinline__ float minus_infinity() {
    return __uint_as_float(0xff800000u);
}
