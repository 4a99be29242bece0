// setmaxnreg: moves registers from one warpgroup to another.
#pragma once

#include "common/types.cuh"

// All threads of a warpgroup: lowers the register count to `kRegisters`, a multiple of 8.
template <int kRegisters>
__device__ __forceinline__ void keep_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// All threads of a warpgroup: raises the register count to `kRegisters`, a multiple of 8, once
// other warpgroups have released enough registers.
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
