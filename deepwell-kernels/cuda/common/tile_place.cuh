// Position in a result that is computed by tiles.
#pragma once

#include "common/types.cuh"

// Counted in tiles, or in elements (the first element of a tile), as each function documents.
struct TilePlace {
    uint32 row;
    uint32 column;
};
