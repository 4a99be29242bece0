// Thread layout of a CTA over a tile that it quantizes, and the addresses of quantized operands.
#pragma once

#include "common/types.cuh"
#include "layout/scale_tile.cuh"

constexpr uint32 kMxTile = 128;    // rows and columns of a tile
constexpr uint32 kMxBlock = 32;    // elements per stored scale
constexpr int kMxSteps = 8;        // vectors per thread
constexpr uint32 kMxStepRows = 16; // rows between two vectors of a thread
constexpr uint32 kMxGroups = kMxTile / kMxBlock;

// Thread layout of a CTA over a tile.
template <typename E>
struct MxTile {
    static constexpr uint32 kVector = 16 / sizeof(E);
    static constexpr uint32 kRowLanes = kMxTile / kVector;     // threads of a row
    static constexpr uint32 kBlockLanes = kMxBlock / kVector;  // threads of 32 elements of a row
    static constexpr uint32 kThreads = kRowLanes * kMxStepRows;
    static constexpr uint32 kUnits = kMxTile * sizeof(E) / 4;  // words of a row
    static constexpr uint32 kTileBytes = kMxTile * kMxTile * sizeof(E);
    static_assert(kThreads == kUnits * kMxGroups, "a word of columns and 32 rows for each thread");

    static __device__ __forceinline__ uint32 row() {
        return threadIdx.x / kRowLanes;
    }
    static __device__ __forceinline__ uint32 column() {
        return threadIdx.x % kRowLanes * kVector;
    }
};

// Outputs of the quantization of a matrix; pointers of operands that are not produced are not read.
// Scales are stored in tiles, see layout/scale_tile.cuh; the scales of a tile of elements are one
// scale tile of each operand.
struct MxTarget {
    uint8* data;     // [rows, columns]
    uint8* scales;    // [ceil(rows / 128), ceil(columns / 128), 512]
    uint8* data_t;   // [columns, rows]
    uint8* scales_t;  // [ceil(columns / 128), ceil(rows / 128), 512]
    uint32 rows;
    uint32 columns;

    // Matrix `index` of a stack of matrices, each with scales of its own.
    __device__ __forceinline__ MxTarget of_stack(uint32 index) const {
        const uint64 elements = static_cast<uint64>(rows) * columns * index;
        const uint32 down = scale_tiles_across(rows), across = scale_tiles_across(columns);
        const uint64 of_scales = static_cast<uint64>(down) * across * kScaleTileBytes * index;
        return MxTarget{data + elements,      scales + of_scales, data_t + elements,
                        scales_t + of_scales, rows,               columns};
    }

    // Scale tiles that hold the scales of element (row, column).
    __device__ __forceinline__ uint8* scale_tile(uint32 row, uint32 column) const {
        return scales + scale_tile_place(row, column, columns);
    }
    __device__ __forceinline__ uint8* scale_tile_t(uint32 row, uint32 column) const {
        return scales_t + scale_tile_place(column, row, rows);
    }
};

// Shared memory for the tiles of `layout/mx_plain_tile.cuh`, without the stage.
struct alignas(16) MxPlainShared {
    // Indexed by warps and words of columns; padded against bank conflicts.
    uint32 amaxes[kMxTile / 16][kMxTile / 2 + 8];
    uint32 factors[kMxGroups][kMxTile / 2];  // indexed by groups of rows and words of columns
    uint4 scales[kScaleTileBytes / 16];      // a scale tile of the rowwise operand
    uint4 scales_t[kScaleTileBytes / 16];    // a scale tile of the columnwise operand
};

// Shared memory besides the tile itself.
struct MxShared {
    uint32 square_amax[kMxGroups * kMxGroups];
    uint32 column_amax[kMxGroups][kMxTile];
    uint32 scales[kMxTile];    // a scale tile of the rowwise operand
    uint32 scales_t[kMxTile];  // a scale tile of the columnwise operand
};
