// Tile of a matrix operand in shared memory: copies from global memory, and reads of fragments.
//
// An operand of a GEMM has an outer axis (M of the left, N of the right operand) and K, the
// contracted axis. Storage has one of two orders:
//   K-major:  element (outer, k) at data[outer * leading + k], tile rows of 128 bytes;
//   MN-major: element (outer, k) at data[k * leading + outer], tile rows of 256 bytes.
// A tile is 128 outer by 128 bytes of K, 16 KiB. The 16-byte chunks of each row are permuted by xor
// with the row index: the eight chunks that one phase of ldmatrix reads, of equal index in eight
// rows, then lie in different banks.
#pragma once

#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

constexpr int kTileOuter = 128;
constexpr int kTileBytes = 16 * 1024;

// Operand in device memory.
template <typename Element>
struct TileOperand {
    const Element* data;
    int64 leading;  // elements from one stored row to the next
    int32 outer;    // extent
    int32 k;    // extent
};

template <int kRowBytes>
__device__ __forceinline__ uint32 swizzled(uint32 row, uint32 chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
}

// One thread's share of the copies of an operand's tiles; `kThreads` threads copy together.
// Elements outside the matrix become zero. With `kVector` the start and the length of rows are
// multiples of 16 bytes; otherwise elements are read one by one.
template <typename Element, bool kKMajor, bool kVector, int kThreads>
class TileCopy {
    static constexpr int kElements = 16 / sizeof(Element);  // per chunk
    static constexpr int kTileK = 128 / sizeof(Element);    // per tile
    static constexpr int kRowBytes = kKMajor ? 128 : 256;
    static constexpr int kRowChunks = kRowBytes / 16;
    static constexpr int kRowStep = kThreads / kRowChunks;  // rows between a thread's chunks
    static constexpr int kChunks = kTileBytes / 16 / kThreads;
    static_assert(kKMajor || sizeof(Element) == 2, "ldmatrix transposes 16-bit elements only");
    static_assert(kRowStep % 8 == 0, "a thread's chunks share their place in the permutation");

    const Element* source_;  // this thread's first chunk of the tile at k = 0
    int64 leading_;
    int32 row_;     // stored row of the first chunk within the tile
    int32 column_;  // first element of the chunk within the tile's row
    int32 outer_;   // outer extent from the tile's start on
    int32 k_;

  public:
    __device__ __forceinline__ TileCopy(const TileOperand<Element>& operand, int32 outer_start) {
        row_ = threadIdx.x / kRowChunks;
        column_ = threadIdx.x % kRowChunks * kElements;
        outer_ = operand.outer - outer_start;
        k_ = operand.k;
        leading_ = operand.leading;
        const int64 start = kKMajor ? outer_start * leading_ : outer_start;
        source_ = operand.data + start + row_ * leading_ + column_;
    }

    // Starts the copy of the tile at `k`, which may lie outside the matrix.
    __device__ __forceinline__ void start(unsigned char* tile, int32 k) const {
        const uint32 chunk = column_ / kElements;
        unsigned char* target = tile + swizzled<kRowBytes>(row_, chunk);
        const Element* source = source_ + (kKMajor ? k : k * leading_);
        const int32 left = k_ - k;
        // Single-element reads are not unrolled: unrolling would exceed the registers.
        constexpr int kUnroll = kVector ? kChunks : 1;
#pragma unroll kUnroll
        for (int i = 0; i < kChunks; ++i) {
            const int32 row = row_ + i * kRowStep;
            const bool row_inside = row < (kKMajor ? outer_ : left);
            const int32 columns = (kKMajor ? left : outer_) - column_;
            if constexpr (kVector) {
                const uint32 bytes = row_inside && columns > 0 ? 16 : 0;
                cp_async_16(shared_address(target + i * kRowStep * kRowBytes), source, bytes);
            } else {
                const int32 inside = row_inside ? columns : 0;
                *reinterpret_cast<uint4*>(target + i * kRowStep * kRowBytes) =
                    gather(source, inside);
            }
            source += kRowStep * leading_;
        }
    }

  private:
    // Reads the first `inside` elements at `source`, followed by zeros.
    static __device__ __forceinline__ uint4 gather(const Element* source, int32 inside) {
        uint32 words[4] = {};
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
            uint32 bits = 0;
            if (i < inside) {
                if constexpr (sizeof(Element) == 2) {
                    bits = source[i].bits;
                } else {
                    bits = source[i];
                }
            }
            words[i * sizeof(Element) / 4] |= bits << (i * sizeof(Element) % 4 * 8);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

enum class Side { kLeft, kRight };

// Loads a fragment of sixteen outer by 32 bytes of K for mma.sync, by one warp. `outer` is the
// first outer index within the tile, a multiple of 16; `step` counts 32 bytes of K. Left: the four
// words of the left operand. Right: both words of the right operand for the first eight columns,
// then both words for the next eight.
template <Side kSide, bool kKMajor>
__device__ __forceinline__ void tile_fragment(uint32 (&fragment)[4], const unsigned char* tile,
                                              uint32 outer, uint32 step) {
    const uint32 lane = threadIdx.x % 32;
    // Lanes 8j to 8j + 7 give the row addresses of matrix j; the order of the four quarters of the
    // fragment depends on the side.
    const uint32 low = lane >> 3 & 1;
    const uint32 high = lane >> 4;
    const uint32 outer_half = kSide == Side::kLeft ? low : high;
    const uint32 k_half = kSide == Side::kLeft ? high : low;
    if constexpr (kKMajor) {
        const uint32 row = outer + outer_half * 8 + lane % 8;
        const uint32 chunk = step * 2 + k_half;
        ldmatrix_x4(fragment, shared_address(tile + swizzled<128>(row, chunk)));
    } else {
        const uint32 row = step * 16 + k_half * 8 + lane % 8;
        const uint32 chunk = outer / 8 + outer_half;
        ldmatrix_x4_trans(fragment, shared_address(tile + swizzled<256>(row, chunk)));
    }
}
