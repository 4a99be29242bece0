// Contiguous parts of a matrix, placed side by side:
//
//   x [parts, rows, units] to joined [rows, parts, units], units of 16 bytes
//
// Copies, with unchanged bits. Roofline: the bytes of both at memcpy bandwidth. A warp moves
// neighbouring units and writes one contiguous run of bytes.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"

constexpr uint32 kThreads = 256;

// 16-byte aligned. Fewer than 2^32 units of 16 bytes.
extern "C" __global__ void __launch_bounds__(kThreads)
    join_parts(const uint4* __restrict__ x, uint4* __restrict__ joined, uint32 parts, uint32 rows,
               uint32 units) {
    const uint64 all = uint64{parts} * rows * units;
    const uint64 stride = uint64{gridDim.x} * kThreads;
    for (uint64 at = uint64{blockIdx.x} * kThreads + threadIdx.x; at < all; at += stride) {
        const uint32 run = static_cast<uint32>(at) / units;
        const uint32 unit = static_cast<uint32>(at) - run * units;
        const uint32 row = run / parts;
        const uint32 part = run - row * parts;
        joined[at] = x[(uint64{part} * rows + row) * units + unit];
    }
}
