// Philox 4x32-10: four random words for each counter, a function of counter and key alone. Same
// sequence as `Philox` of `deepwell-precision`. Source: Salmon, Moraes, Dror, Shaw, "Parallel
// random numbers: as easy as 1, 2, 3" (SC11).
#pragma once

#include "common/types.cuh"

// Returns the words of indices 4 * at to 4 * at + 3 of a stream.
__device__ __forceinline__ uint4 philox_words(uint64 at, uint64 stream, uint64 seed) {
    constexpr int kRounds = 10;
    uint4 counter = make_uint4(static_cast<uint32>(at), static_cast<uint32>(at >> 32),
                               static_cast<uint32>(stream), static_cast<uint32>(stream >> 32));
    uint32 key0 = static_cast<uint32>(seed), key1 = static_cast<uint32>(seed >> 32);
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const uint64 first = static_cast<uint64>(0xd2511f53u) * counter.x;
        const uint64 second = static_cast<uint64>(0xcd9e8d57u) * counter.z;
        counter = make_uint4(static_cast<uint32>(second >> 32) ^ counter.y ^ key0,
                             static_cast<uint32>(second),
                             static_cast<uint32>(first >> 32) ^ counter.w ^ key1,
                             static_cast<uint32>(first));
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return counter;
}
