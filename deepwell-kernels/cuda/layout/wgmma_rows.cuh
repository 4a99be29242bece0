// Rows of 16-bit elements in shared memory for wgmma: [kRows, kWidth], split into chunks of 64
// columns. The rows of a chunk are contiguous, 128 bytes each, in the 128-byte swizzle of TMA
// (16-byte units permuted by the row index modulo eight); 1024-byte aligned. The last chunk may
// have columns beyond kWidth.
#pragma once

#include "common/types.cuh"

constexpr int kChunkColumns = 64;
constexpr int kChunkRowBytes = 128;

// wgmma descriptor of a matrix in two words: bits 0 to 13 address, 16 to 29 "leading", 32 to 45
// "stride" bytes, all in units of 16 bytes; 62 and 63 swizzle, 1 for 128 bytes.
struct WgmmaMatrix {
    uint32 low;
    uint32 high;

    // Descriptor of the matrix that begins `bytes` bytes later.
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

    // Bytes from the first row to a 16-byte unit of a row.
    static __device__ __forceinline__ uint32 offset(uint32 row, uint32 unit) {
        return unit / 8 * kChunkBytes + row * kChunkRowBytes + (unit % 8 ^ row % 8) * 16;
    }

    // K-major operands: K goes along the columns. `column_step` advances K by 16.
    static __device__ __forceinline__ WgmmaMatrix rows(uint32 address) {
        // The leading bytes are ignored, as 16 elements along K lie within a swizzle.
        return WgmmaMatrix{(address >> 4 & 0x3fff) | 1 << 16, kStride};
    }

    // Bytes to the `step`-th group of 16 columns.
    static constexpr __device__ uint32 column_step(int step) {
        return step / 4 * kChunkBytes + step % 4 * 32;
    }

    // A right operand with K along the rows, all columns. `row_step` advances K by 16.
    static __device__ __forceinline__ WgmmaMatrix columns(uint32 address) {
        return WgmmaMatrix{(address >> 4 & 0x3fff) | (kChunkBytes >> 4) << 16, kStride};
    }

    // Bytes to the `step`-th group of 16 rows.
    static constexpr __device__ uint32 row_step(int step) {
        return step * 16 * kChunkRowBytes;
    }

  private:
    // Stride between groups of eight rows, and the swizzle.
    static constexpr uint32 kStride = 8 * kChunkRowBytes >> 4 | 1u << 30;
};
