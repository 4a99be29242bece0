// A place in a result that is computed by tiles.
#pragma once

#include "common/types.cuh"

// In tiles, or the first element of a tile: who gives one says which.
struct TilePlace {
    uint32 row;
    uint32 column;
};
