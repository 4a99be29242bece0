// How a block of threads lies over a tile that it quantizes, and where the copies go.
#pragma once

#include "common/types.cuh"

constexpr uint32 kMxTile = 128;    // rows and columns of a tile
constexpr uint32 kMxBlock = 32;    // elements with one stored scale
constexpr int kMxSteps = 8;        // pieces of a thread
constexpr uint32 kMxStepRows = 16; // rows between two pieces of a thread
constexpr uint32 kMxGroups = kMxTile / kMxBlock;

// How a block of threads lies over a tile.
template <typename E>
struct MxTile {
    static constexpr uint32 kPiece = 16 / sizeof(E);
    static constexpr uint32 kRowLanes = kMxTile / kPiece;     // threads of a row
    static constexpr uint32 kBlockLanes = kMxBlock / kPiece;  // threads of 32 elements of it
    static constexpr uint32 kThreads = kRowLanes * kMxStepRows;
    static constexpr uint32 kUnits = kMxTile * sizeof(E) / 4;  // words of a row
    static constexpr uint32 kTileBytes = kMxTile * kMxTile * sizeof(E);
    static_assert(kThreads == kUnits * kMxGroups, "a word of columns and 32 rows for each thread");

    static __device__ __forceinline__ uint32 row() {
        return threadIdx.x / kRowLanes;
    }
    static __device__ __forceinline__ uint32 column() {
        return threadIdx.x % kRowLanes * kPiece;
    }
};

// Where the copies of a matrix go; pointers of copies that are not made are not looked at.
struct MxTarget {
    uint8* codes;     // [rows, columns]
    uint8* scales;    // [rows, ceil(columns / 32)]
    uint8* codes_t;   // [columns, rows]
    uint8* scales_t;  // [columns, ceil(rows / 32)]
    uint32 rows;
    uint32 columns;
};

// What a block needs for the tiles of `layout/mx_plain_tile.cuh`, beside the stage.
struct alignas(16) MxPlainShared {
    // By warps and words of columns; a little longer than these, for the banks.
    uint32 amaxes[kMxTile / 16][kMxTile / 2 + 8];
    uint32 factors[kMxGroups][kMxTile / 2];  // by groups of rows and words of columns
};

// What a block needs beside the tile itself.
struct MxShared {
    uint32 square_amax[kMxGroups * kMxGroups];
    uint32 column_amax[kMxGroups][kMxTile];
    uint32 column_scales[kMxTile];  // four bytes each
};
