// Rows of 16-bit elements in shared memory as wgmma takes them: [kRows, kWidth], cut into chunks of
// 64 columns. A chunk has its rows one after the other, each 128 bytes whose 16-byte units are
// exchanged by the row's number modulo eight, as tensor copies with a swizzle of 128 bytes leave
// them; 1024-byte aligned. The last chunk may have columns beyond kWidth.
#pragma once

#include "common/types.cuh"

constexpr int kChunkColumns = 64;
constexpr int kChunkRowBytes = 128;

// What wgmma is told of a matrix, in two words: bits 0 to 13 the address, 16 to 29 "leading", 32 to
// 45 "stride" bytes, all in units of 16 bytes; 62 and 63 the swizzle, 1 for 128 bytes.
struct WgmmaMatrix {
    uint32 low;
    uint32 high;

    // The matrix that begins so many bytes later.
    __device__ __forceinline__ uint64 at(uint32 bytes) const {
        return static_cast<uint64>(high) << 32 | (low + (bytes >> 4));
    }
};

template <int kRows, int kWidth>
struct WgmmaRows {
    static_assert(kRows % 8 == 0 && kWidth % 16 == 0, "whole swizzles, and steps of wgmma");

    static constexpr int kSteps = kWidth / 16;  // of 16 columns
    static constexpr int kChunks = (kWidth + kChunkColumns - 1) / kChunkColumns;
    static constexpr int kChunkBytes = kRows * kChunkRowBytes;
    static constexpr int kBytes = kChunks * kChunkBytes;

    // From the first row on to the unit of 16 bytes of a row.
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 unit) {
        return unit / 8 * kChunkBytes + row * kChunkRowBytes + (unit % 8 ^ row % 8) * 16;
    }

    // Operands whose K goes along the columns. K moves by 16 with `column_step`.
    static __device__ __forceinline__ WgmmaMatrix rows(uint32 address) {
        // Neither leading bytes mean anything, as 16 along K lie within a swizzle.
        return WgmmaMatrix{(address >> 4 & 0x3fff) | 1 << 16, kStride};
    }

    // Bytes to the 16 columns number `step`.
    static constexpr __device__ uint32 column_step(int step) {
        return step / 4 * kChunkBytes + step % 4 * 32;
    }

    // A right operand whose K goes along the rows, all columns. K moves by 16 with `row_step`.
    static __device__ __forceinline__ WgmmaMatrix columns(uint32 address) {
        return WgmmaMatrix{(address >> 4 & 0x3fff) | (kChunkBytes >> 4) << 16, kStride};
    }

    // Bytes to the 16 rows number `step`.
    static constexpr __device__ uint32 row_step(int step) {
        return step * 16 * kChunkRowBytes;
    }

  private:
    // Between groups of eight rows, and the swizzle.
    static constexpr uint32 kStride = 8 * kChunkRowBytes >> 4 | 1u << 30;
};
