// The largest finite magnitude of each part of a tensor (layout/nvfp4_groups.cuh), or of each part
// after a Hadamard transform of groups of 16 elements along K, for the scales of NVFP4. Magnitudes
// have the order of their bits, so the maximum over CTAs is one of integers, in any order.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/nvfp4_groups.cuh"

// Elements of a transformed group, of which some may not exist, are zeros beyond the matrix.
template <typename E, bool kColumn>
__device__ __forceinline__ void amax_of_parts(const E* __restrict__ x, const Fp4Parts& parts,
                                              uint32 flags, uint32* amaxes) {
    extern __shared__ uint4 dynamic[];
    __shared__ uint32 of_warps[kFp4Threads / 32];
    E* const tile = reinterpret_cast<E*>(dynamic);
    const Fp4Place place(parts);
    if (!place.exists || !place.is_owned(parts)) {
        return;
    }
    place.load(parts, x, tile);
    __syncthreads();
    uint32 largest = 0;
    constexpr uint32 kAlong = kFp4Threads / kFp4Tile;
#pragma unroll 1
    for (uint32 block = threadIdx.x / kFp4Tile; block < kFp4TileBlocks; block += kAlong) {
        float values[kFp4Block];
        fp4_load_block<E, kColumn>(tile, threadIdx.x % kFp4Tile, block, values);
        if (flags & kFp4Hadamard) {
            fp4_hadamard(values, flags);
        }
#pragma unroll
        for (uint32 i = 0; i < kFp4Block; ++i) {
            const uint32 magnitude = __float_as_uint(values[i]) & 0x7fffffffu;
            largest = max(largest, magnitude < kInfinityBits ? magnitude : 0);
        }
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) {
        of_warps[threadIdx.x / 32] = largest;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 1; warp < kFp4Threads / 32; ++warp) {
            largest = max(largest, of_warps[warp]);
        }
        atomicMax(amaxes + place.part, largest);
    }
}

// x, 16-byte aligned: [rows, columns] with offsets [parts + 1], or [parts, rows, columns] without;
// amaxes [parts], zero before the launch. One CTA per tile.
#define AMAX_KERNEL(name, E, column)                                                             \
    extern "C" __global__ void __launch_bounds__(kFp4Threads)                                    \
        name(const E* __restrict__ x, const int32* __restrict__ offsets, uint32 parts,           \
             uint32 rows, uint32 columns, uint32 flags, uint32* amaxes) {                        \
        amax_of_parts<E, column>(x, Fp4Parts{offsets, parts, rows, columns}, flags, amaxes);     \
    }

AMAX_KERNEL(amax_groups_bf16_row, bf16, false)
AMAX_KERNEL(amax_groups_bf16_column, bf16, true)
AMAX_KERNEL(amax_groups_f32_row, float, false)
AMAX_KERNEL(amax_groups_f32_column, float, true)
