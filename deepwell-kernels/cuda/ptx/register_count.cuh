// setmaxnreg: registers that a warpgroup gives back, and that another then takes.
#pragma once

#include "common/types.cuh"

// All threads of a warpgroup: each keeps this many, a multiple of 8 and fewer than before.
template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// All threads of a warpgroup: each has this many, a multiple of 8 and more than before, as soon as
// others have given them back.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
