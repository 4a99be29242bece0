// One kM x kN tile of a GEMM with FP32 accuracy on BF16 tensor cores, by 256 threads: for the few
// GEMMs whose operands must not be rounded.
//
// An FP32 element is split into an exact sum of three BF16: the rounded element, the rounded
// remainder, and the rest, which has at most eight bits. A BF16 element is a single part. Products
// of parts below 2^-26 of the whole are skipped. Tensor cores truncate sums, and the error grows
// with K; so each tile of 32 along K starts from zero and is added to the accumulators in FP32.
// Sums run over K in ascending order. Values beyond BF16, infinity and numbers that round to it,
// become NaN in FP32 operands.
//
// Tiles of 32 along K pass through registers into two buffers in shared memory: the elements of the
// next tile are loaded during the MMAs of the current tile. Rows of a buffer are padded by 16
// bytes, so that the eight rows that one ldmatrix phase reads lie in different banks.
#pragma once

#include "common/types.cuh"
#include "layout/operand_tile.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma_sync.cuh"

namespace split_tile {

constexpr int kBlockK = 32;
constexpr int kSteps = kBlockK / 16;
constexpr int kThreads = 256;
constexpr int kOwn = 4;  // elements that a thread reads at a time

// Number of BF16 parts of an element.
template <typename Element>
constexpr int kParts = sizeof(Element) == 4 ? 3 : 1;

// Layout of the warps over a tile, kAcross along its columns.
template <int kM, int kN>
struct Warps {
    static constexpr int kAcross = kN > kM ? 4 : 2;
    static constexpr int kDown = kThreads / 32 / kAcross;
    static constexpr int kFragmentsM = kM / kDown / 16;
    static constexpr int kFragmentsN = kN / kAcross / 8;
    static_assert(kFragmentsM * kDown * 16 == kM, "whole fragments");
    static_assert(kFragmentsN % 2 == 0 && kFragmentsN * kAcross * 8 == kN, "whole pairs of them");

    static __device__ __forceinline__ int32 row() {
        return threadIdx.x / 32 / kAcross * (kM / kDown);
    }
    static __device__ __forceinline__ int32 column() {
        return threadIdx.x / 32 % kAcross * (kN / kAcross);
    }
};

template <int kM, int kN>
using Accumulators = float[Warps<kM, kN>::kFragmentsM][Warps<kM, kN>::kFragmentsN][4];

// Operand tile in shared memory, in the operand's storage order: rows of kBlockK elements each, or
// rows along K of kOuter elements each.
template <bool kKMajor, int kOuter>
struct Buffer {
    static constexpr int kRows = kKMajor ? kOuter : kBlockK;
    static constexpr int kRowBytes = (kKMajor ? kBlockK : kOuter) * 2 + 16;
    alignas(16) unsigned char bytes[kRows * kRowBytes];

    // Loads a fragment of sixteen outer by sixteen along K for mma.sync, see `tile_fragment`.
    template <Side kSide>
    __device__ __forceinline__ void fragment(uint32 (&words)[4], uint32 outer, uint32 step) const {
        const uint32 lane = threadIdx.x % 32;
        const uint32 low = lane >> 3 & 1, high = lane >> 4;
        const uint32 outer_at = outer + (kSide == Side::kLeft ? low : high) * 8;
        const uint32 k_at = step * 16 + (kSide == Side::kLeft ? high : low) * 8;
        if constexpr (kKMajor) {
            const uint32 place = (outer_at + lane % 8) * kRowBytes + k_at * 2;
            ldmatrix_x4(words, shared_address(bytes + place));
        } else {
            const uint32 place = (k_at + lane % 8) * kRowBytes + outer_at * 2;
            ldmatrix_x4_trans(words, shared_address(bytes + place));
        }
    }
};

template <typename A, typename B, bool kAKMajor, bool kBKMajor, int kM, int kN>
struct Shared {
    Buffer<kAKMajor, kM> a[2][kParts<A>];
    Buffer<kBKMajor, kN> b[2][kParts<B>];
};

// Four neighbouring elements of an operand, between global and shared memory.
template <typename Element>
struct Held;

template <>
struct Held<float> {
    float values[kOwn];

    __device__ __forceinline__ void read(const float* from) {
        const float4 four = *reinterpret_cast<const float4*>(from);
        values[0] = four.x;
        values[1] = four.y;
        values[2] = four.z;
        values[3] = four.w;
    }
    // Reads the first `inside` elements, followed by zeros.
    __device__ __forceinline__ void gather(const float* from, int32 inside) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            values[i] = i < inside ? from[i] : 0.0f;
        }
    }
    // Returns the next BF16 part of the elements, and keeps the remainder.
    __device__ __forceinline__ uint2 take_part() {
        uint32 words[kOwn / 2];
#pragma unroll
        for (int pair = 0; pair < kOwn / 2; ++pair) {
            float& low = values[2 * pair];
            float& high = values[2 * pair + 1];
            words[pair] = to_bf16_pair(low, high);
            low -= low_to_f32(words[pair]);
            high -= high_to_f32(words[pair]);
        }
        return make_uint2(words[0], words[1]);
    }
};

template <>
struct Held<bf16> {
    uint2 words;

    __device__ __forceinline__ void read(const bf16* from) {
        words = *reinterpret_cast<const uint2*>(from);
    }
    __device__ __forceinline__ void gather(const bf16* from, int32 inside) {
        uint32 bits[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            bits[i] = i < inside ? from[i].bits : 0;
        }
        words = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
    }
    __device__ __forceinline__ uint2 take_part() {
        return words;
    }
};

// A thread's share of an operand's tiles: four neighbouring elements of a stored row, several
// times. Elements outside the matrix are zero.
template <typename Element, bool kKMajor, int kOuter>
class Fetch {
    static constexpr int kRounds = kOuter * kBlockK / kOwn / kThreads;
    static_assert(kRounds * kOwn * kThreads == kOuter * kBlockK, "each thread has its part");
    static constexpr int kRowVectors = (kKMajor ? kBlockK : kOuter) / kOwn;

    const TileOperand<Element>& operand_;
    int32 start_;  // first outer index of the tile
    bool vector_;  // whether four elements can be read at once
    Held<Element> held_[kRounds];

  public:
    __device__ __forceinline__ Fetch(const TileOperand<Element>& operand, int32 outer_start)
        : operand_(operand), start_(outer_start), vector_(operand.leading % kOwn == 0) {}

    // Moves to the tile that begins at `outer_start`.
    __device__ __forceinline__ void move(int32 outer_start) {
        start_ = outer_start;
    }

    __device__ __forceinline__ void read(int32 tile_k) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int32 vector = threadIdx.x + round * kThreads;
            const int32 row = vector / kRowVectors + (kKMajor ? start_ : tile_k);
            const int32 column = vector % kRowVectors * kOwn + (kKMajor ? tile_k : start_);
            const int32 rows = kKMajor ? operand_.outer : operand_.k;
            const int32 columns = kKMajor ? operand_.k : operand_.outer;
            const int32 inside = row < rows ? columns - column : 0;
            const Element* const from = operand_.data + row * operand_.leading + column;
            if (vector_ && inside >= kOwn) {
                held_[round].read(from);
            } else {
                held_[round].gather(from, inside);
            }
        }
    }

    // Writes each part of the last elements read into its buffer.
    __device__ __forceinline__ void put(Buffer<kKMajor, kOuter> (&parts)[kParts<Element>]) {
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int32 vector = threadIdx.x + round * kThreads;
            const int32 place = vector / kRowVectors * Buffer<kKMajor, kOuter>::kRowBytes +
                                vector % kRowVectors * kOwn * 2;
#pragma unroll
            for (int part = 0; part < kParts<Element>; ++part) {
                *reinterpret_cast<uint2*>(parts[part].bytes + place) = held_[round].take_part();
            }
        }
    }
};

template <int kM, int kN>
__device__ __forceinline__ void clear(Accumulators<kM, kN>& accumulators) {
    using Of = Warps<kM, kN>;
#pragma unroll
    for (int m = 0; m < Of::kFragmentsM; ++m) {
#pragma unroll
        for (int n = 0; n < Of::kFragmentsN; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                accumulators[m][n][i] = 0.0f;
            }
        }
    }
}

// accumulators += the product of two tiles in shared memory, over 32 along K.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, int kPartsA, int kPartsB>
__device__ __forceinline__ void multiply(Accumulators<kM, kN>& accumulators,
                                         const Buffer<kAKMajor, kM> (&of_a_tile)[kPartsA],
                                         const Buffer<kBKMajor, kN> (&of_b_tile)[kPartsB]) {
    using Of = Warps<kM, kN>;
    uint32 of_a[kSteps][kPartsA][Of::kFragmentsM][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int part = 0; part < kPartsA; ++part) {
#pragma unroll
            for (int m = 0; m < Of::kFragmentsM; ++m) {
                of_a_tile[part].template fragment<Side::kLeft>(
                    of_a[step][part][m], Of::row() + m * 16, step);
            }
        }
    }
#pragma unroll
    for (int pair = 0; pair < Of::kFragmentsN / 2; ++pair) {
        float sums[Of::kFragmentsM][2][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int part_b = kPartsB - 1; part_b >= 0; --part_b) {
                uint32 of_b[4];
                of_b_tile[part_b].template fragment<Side::kRight>(
                    of_b, Of::column() + pair * 16, step);
#pragma unroll
                for (int part_a = min(kPartsA, 3 - part_b) - 1; part_a >= 0; --part_a) {
#pragma unroll
                    for (int m = 0; m < Of::kFragmentsM; ++m) {
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            mma_m16n8k16_bf16(sums[m][half], of_a[step][part_a][m],
                                              of_b[2 * half], of_b[2 * half + 1],
                                              sums[m][half]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < Of::kFragmentsM; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    accumulators[m][2 * pair + half][i] += sums[m][half][i];
                }
            }
        }
    }
}

// accumulators = the tile of a b that begins at (row, column), over K from k_begin, a multiple of
// 32, to a.k, equal to b.k.
template <bool kAKMajor, bool kBKMajor, int kM, int kN, typename A, typename B>
__device__ __forceinline__ void mainloop(Accumulators<kM, kN>& accumulators,
                                         const TileOperand<A>& a, const TileOperand<B>& b,
                                         int32 row, int32 column, int32 k_begin,
                                         Shared<A, B, kAKMajor, kBKMajor, kM, kN>& shared) {
    Fetch<A, kAKMajor, kM> fetch_a(a, row);
    Fetch<B, kBKMajor, kN> fetch_b(b, column);
    clear<kM, kN>(accumulators);
    int32 buffer = 0;
    fetch_a.read(k_begin);
    fetch_b.read(k_begin);
    for (int32 k = k_begin; k < a.k; k += kBlockK) {
        fetch_a.put(shared.a[buffer]);
        fetch_b.put(shared.b[buffer]);
        // After this barrier all threads have read the other buffer, which the next tile
        // overwrites.
        __syncthreads();
        if (k + kBlockK < a.k) {
            fetch_a.read(k + kBlockK);
            fetch_b.read(k + kBlockK);
        }
        multiply<kAKMajor, kBKMajor, kM, kN>(accumulators, shared.a[buffer], shared.b[buffer]);
        buffer ^= 1;
    }
}

// Shared memory of `walk`: all of a tile's columns of b, by tiles of K, and two tiles of a.
template <int kM, int kN>
struct WalkShared {
    Buffer<true, kM> a[2][kParts<float>];
    Buffer<false, kN> b[1][kParts<float>];  // one per tile along K
};

// Computes the tiles of a b (a K-major, b MN-major) at rows `row`, `row + step`, ... of `column`,
// over all of K; `write(accumulators, row)` stores each. The parts of b are computed once, and the
// next tile of a is loaded while the current tile is multiplied and written.
template <int kM, int kN, typename Write>
__device__ __forceinline__ void walk(const TileOperand<float>& a, const TileOperand<float>& b,
                                     int32 row, int32 step, int32 column,
                                     WalkShared<kM, kN>& shared, const Write& write) {
    Fetch<float, false, kN> fetch_b(b, column);
    for (int32 k = 0; k < b.k; k += kBlockK) {
        fetch_b.read(k);
        fetch_b.put(shared.b[k / kBlockK]);
    }
    Fetch<float, true, kM> fetch_a(a, row);
    fetch_a.read(0);
    int32 buffer = 0;
    for (; row < a.outer; row += step) {
        Accumulators<kM, kN> accumulators;
        clear<kM, kN>(accumulators);
        for (int32 k = 0; k < a.k; k += kBlockK) {
            fetch_a.put(shared.a[buffer]);
            // After this barrier all threads have read the other buffer, which the next tile
            // overwrites.
            __syncthreads();
            const bool is_last = k + kBlockK >= a.k;
            if (is_last) {
                fetch_a.move(row + step);
            }
            // Reads beyond the rows yield zeros.
            fetch_a.read(is_last ? 0 : k + kBlockK);
            multiply<true, false, kM, kN>(accumulators, shared.a[buffer],
                                          shared.b[k / kBlockK]);
            buffer ^= 1;
        }
        write(accumulators, row);
    }
}

}  // namespace split_tile
