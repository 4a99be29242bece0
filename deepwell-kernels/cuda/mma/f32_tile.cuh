// One kM x kN tile of a GEMM in FP32, by 256 threads and without tensor cores: for the few GEMMs
// whose operands may not be rounded. Tiles of 64 x 64, or long ones for a result with few rows or
// columns.
//
// Tiles of 16 along K go through two buffers in shared memory, K first, by way of registers: the
// elements of the next tile are read from memory while the present one is multiplied. A thread has
// 4 x 4 of the result. Sums run over K in ascending order.
#pragma once

#include "common/types.cuh"
#include "layout/operand_tile.cuh"

namespace f32_tile {

constexpr int kBlockK = 16;
constexpr int kThreads = 256;
constexpr int kOwn = 4;  // rows and columns of a thread, and elements that it reads at a time

// A buffer's row, padded for the banks.
template <int kOuter>
using Buffer = float[kBlockK][kOuter + 4];

template <int kM, int kN>
struct Shared {
    static_assert(kM * kN == kThreads * kOwn * kOwn, "each thread has its part");
    alignas(16) Buffer<kM> a[2];
    alignas(16) Buffer<kN> b[2];
};

using Accumulators = float[kOwn][kOwn];

// Where the calling thread's part of a tile of kN columns begins.
template <int kN>
__device__ __forceinline__ int32 own_row() {
    return threadIdx.x / (kN / kOwn) * kOwn;
}

template <int kN>
__device__ __forceinline__ int32 own_column() {
    return threadIdx.x % (kN / kOwn) * kOwn;
}

__device__ __forceinline__ void read_four(const float* from, float (&values)[kOwn]) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    values[0] = four.x;
    values[1] = four.y;
    values[2] = four.z;
    values[3] = four.w;
}

__device__ __forceinline__ void read_four(const bf16* from, float (&values)[kOwn]) {
    const uint2 four = *reinterpret_cast<const uint2*>(from);
    values[0] = low_to_f32(four.x);
    values[1] = high_to_f32(four.x);
    values[2] = low_to_f32(four.y);
    values[3] = high_to_f32(four.y);
}

// A thread's share of an operand's tiles of kOuter by 16 along K: four neighbouring elements of a
// stored row, once or twice; of short tiles half of the threads have nothing. What lies outside of
// the matrix is zero.
template <typename Element, bool kKMajor, int kOuter>
class Fetch {
    static constexpr int kVectors = kOuter * kBlockK / kOwn;
    static constexpr int kRounds = (kVectors + kThreads - 1) / kThreads;

    const TileOperand<Element>& operand_;
    int32 start_;  // first outer index of the tile
    bool vector_;  // whether four elements can be read at once
    float values_[kRounds][kOwn];

    // Outer index and K of a vector within the tile.
    static __device__ __forceinline__ int32 outer_of(int32 vector) {
        return kKMajor ? vector / (kBlockK / kOwn) : vector % (kOuter / kOwn) * kOwn;
    }
    static __device__ __forceinline__ int32 k_of(int32 vector) {
        return kKMajor ? vector % (kBlockK / kOwn) * kOwn : vector / (kOuter / kOwn);
    }

  public:
    __device__ __forceinline__ Fetch(const TileOperand<Element>& operand, int32 outer_start)
        : operand_(operand), start_(outer_start), vector_(operand.leading % kOwn == 0) {}

    __device__ __forceinline__ void read(int32 tile_k) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int32 vector = threadIdx.x + round * kThreads;
            const int32 outer = start_ + outer_of(vector), k = tile_k + k_of(vector);
            const int32 row = kKMajor ? outer : k, column = kKMajor ? k : outer;
            const int32 rows = kKMajor ? operand_.outer : operand_.k;
            const int32 columns = kKMajor ? operand_.k : operand_.outer;
            const int32 inside = vector < kVectors && row < rows ? columns - column : 0;
            const Element* const from = operand_.data + row * operand_.leading + column;
            float(&values)[kOwn] = values_[round];
            if (vector_ && inside >= kOwn) {
                read_four(from, values);
                continue;
            }
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                values[i] = i < inside ? to_f32(from[i]) : 0.0f;
            }
        }
    }

    // Puts what was read last into a buffer.
    __device__ __forceinline__ void put(Buffer<kOuter>& tile) const {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int32 vector = threadIdx.x + round * kThreads;
            if (vector >= kVectors) {
                return;
            }
            const float(&values)[kOwn] = values_[round];
            const int32 outer = outer_of(vector), k = k_of(vector);
            if constexpr (kKMajor) {
#pragma unroll
                for (int i = 0; i < kOwn; ++i) {
                    tile[k + i][outer] = values[i];
                }
            } else {
                *reinterpret_cast<float4*>(&tile[k][outer]) =
                    make_float4(values[0], values[1], values[2], values[3]);
            }
        }
    }
};

// accumulators = the tile of a b that begins at (row, column), over K from k_begin, a multiple of
// 16, to a.k, which is b.k.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void mainloop(Accumulators& accumulators, const TileOperand<A>& a,
                                         const TileOperand<B>& b, int32 row, int32 column,
                                         int32 k_begin, Shared<kM, kN>& shared) {
    Fetch<A, kAKMajor, kM> fetch_a(a, row);
    Fetch<B, kBKMajor, kN> fetch_b(b, column);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            accumulators[i][j] = 0.0f;
        }
    }
    int32 buffer = 0;
    fetch_a.read(k_begin);
    fetch_b.read(k_begin);
    for (int32 k = k_begin; k < a.k; k += kBlockK) {
        fetch_a.put(shared.a[buffer]);
        fetch_b.put(shared.b[buffer]);
        // All threads are done with the other buffer when the next tile is put there.
        __syncthreads();
        if (k + kBlockK < a.k) {
            fetch_a.read(k + kBlockK);
            fetch_b.read(k + kBlockK);
        }
#pragma unroll
        for (int step = 0; step < kBlockK; ++step) {
            float of_a[kOwn], of_b[kOwn];
            read_four(&shared.a[buffer][step][own_row<kN>()], of_a);
            read_four(&shared.b[buffer][step][own_column<kN>()], of_b);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
#pragma unroll
                for (int j = 0; j < kOwn; ++j) {
                    accumulators[i][j] = fmaf(of_a[i], of_b[j], accumulators[i][j]);
                }
            }
        }
        buffer ^= 1;
    }
}

}  // namespace f32_tile
