// Parts of a tensor with a scale each, for kernels whose CTAs have a tile of 128 x 128 elements:
// matrices of a stack, or groups of the rows of one matrix. Groups begin at multiples of 128 rows,
// so that a tile lies in one part.
#pragma once

#include "common/types.cuh"
#include "layout/nvfp4_tile.cuh"

// A stack of matrices [rows, columns] or, with offsets [groups + 1], a single matrix: group e has
// the rows offsets[e] to offsets[e + 1].
struct Fp4Parts {
    const int32* offsets;
    uint32 parts;  // groups, or matrices
    uint32 rows;
    uint32 columns;

    __device__ __forceinline__ uint32 across() const {
        return (columns + kFp4Tile - 1) / kFp4Tile;
    }

    __device__ __forceinline__ uint32 tiles_of_matrix() const {
        return (rows + kFp4Tile - 1) / kFp4Tile * across();
    }

    // Rows that belong to parts.
    __device__ __forceinline__ uint64 owned_rows() const {
        if (offsets == nullptr) {
            return static_cast<uint64>(parts) * rows;
        }
        return min(static_cast<uint32>(max(offsets[parts], 0)), rows);
    }

    // The group of a row; `parts` for a row after all groups.
    __device__ __forceinline__ uint32 group_of(uint32 row) const {
        uint32 first = 0, end = parts;
        while (first < end) {
            const uint32 middle = (first + end) / 2;
            if (static_cast<uint32>(offsets[middle + 1]) <= row) {
                first = middle + 1;
            } else {
                end = middle;
            }
        }
        return first;
    }
};

// The tile of a CTA.
struct Fp4Place {
    uint32 matrix;
    uint32 part;    // the number of parts for rows after all groups
    uint32 row0;    // in the matrix
    uint32 column0;
    bool exists;    // an empty tensor has a CTA without a tile

    __device__ __forceinline__ explicit Fp4Place(const Fp4Parts& parts) {
        const uint32 tiles = parts.tiles_of_matrix();
        matrix = parts.offsets == nullptr && tiles > 0 ? blockIdx.x / tiles : 0;
        exists = tiles > 0 && blockIdx.x < tiles * (parts.offsets == nullptr ? parts.parts : 1);
        const uint32 tile = exists ? blockIdx.x - matrix * tiles : 0;
        row0 = exists ? tile / parts.across() * kFp4Tile : 0;
        column0 = exists ? tile % parts.across() * kFp4Tile : 0;
        part = matrix;
        if (parts.offsets != nullptr) {
            part = exists ? parts.group_of(row0) : 0;
        }
    }

    __device__ __forceinline__ bool is_owned(const Fp4Parts& parts) const {
        return part < parts.parts;
    }

    // Loads the tile of x; rows after all groups are zeros.
    template <typename E>
    __device__ __forceinline__ void load(const Fp4Parts& parts, const E* __restrict__ x,
                                         E* tile) const {
        const uint64 first = static_cast<uint64>(matrix) * parts.rows * parts.columns;
        fp4_load_tile(x + first, is_owned(parts) ? parts.rows : 0, parts.columns, row0, column0,
                      tile);
    }

    // The constants of the part, of which `amaxes` has the largest magnitudes.
    __device__ __forceinline__ Fp4Constants constants(const Fp4Parts& parts,
                                                      const float* __restrict__ amaxes,
                                                      uint32 flags) const {
        return fp4_constants(exists && is_owned(parts) ? amaxes[part] : 0.0f, flags);
    }
};

// The operand of a matrix among operands [outer, k] one after the other.
__device__ __forceinline__ Fp4Operand fp4_operand_of(uint8* data, uint8* scales, uint32 matrix,
                                                     uint32 outer, uint32 k) {
    const uint64 data_bytes = static_cast<uint64>(outer) * ((k + 1) / 2);
    const uint64 down = (outer + kScaleTileRows - 1) / kScaleTileRows;
    const uint64 scale_bytes =
        down * ((k + kFp4ScaleElements - 1) / kFp4ScaleElements) * kScaleTileBytes;
    return Fp4Operand{data + matrix * data_bytes,
                      scales == nullptr ? nullptr : scales + matrix * scale_bytes, outer, k};
}
