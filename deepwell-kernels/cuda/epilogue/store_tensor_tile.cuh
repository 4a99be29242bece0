// Stores accumulators from tensor memory to the result in global memory: factor, bias, rounding,
// accumulation.
//
// Each of four warps reads the 32 lanes of tensor memory that it can access, that is, 32 rows. They
// pass through 4 KiB of shared memory in subtiles of 128 bytes per row, so that a warp stores four
// whole subtile rows at a time.
#pragma once

#include "common/tile_place.cuh"
#include "common/types.cuh"
#include "epilogue/store_tile.cuh"
#include "mma/sm100_tile.cuh"
#include "ptx/tcgen05.cuh"

// A result that is the accumulators times a factor.
template <typename Element>
struct ScaledResult : TileResult<Element> {
    float factor;
};

// Multiplies accumulators by the factor of the result, and rounds.
template <typename Element>
__device__ __forceinline__ void apply_factor(uint32 (&)[32], const TileResult<Element>&) {}

template <typename Element>
__device__ __forceinline__ void apply_factor(uint32 (&values)[32],
                                             const ScaledResult<Element>& result) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        values[i] = __float_as_uint(__fmul_rn(__uint_as_float(values[i]), result.factor));
    }
}

// Adds the bias of 32 columns from `column` on.
template <typename Element>
__device__ __forceinline__ void add_bias(uint32 (&values)[32], const TileResult<Element>& result,
                                         int32 column) {
    if (result.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            if (column + i < result.columns) {
                const float bias = to_f32(result.bias[column + i]);
                values[i] = __float_as_uint(__uint_as_float(values[i]) + bias);
            }
        }
    }
}

// Loads 128 bytes of a lane's row, from column `column` of the result and `address` of tensor
// memory on. On return the whole warp has read tensor memory.
template <template <typename> class Result>
__device__ __forceinline__ void load_subtile(uint4 (&subtile)[8], uint32 address,
                                             const Result<float>& result, int32 column) {
    uint32 values[32];
    tcgen05_load_32_columns(values, address);
    tcgen05_wait_load();
    apply_factor(values, result);
    add_bias(values, result, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        subtile[i] = make_uint4(values[4 * i], values[4 * i + 1], values[4 * i + 2],
                              values[4 * i + 3]);
    }
}

template <template <typename> class Result>
__device__ __forceinline__ void load_subtile(uint4 (&subtile)[8], uint32 address,
                                             const Result<bf16>& result, int32 column) {
    uint32 values[2][32];
    tcgen05_load_32_columns(values[0], address);
    tcgen05_load_32_columns(values[1], address + 32);
    tcgen05_wait_load();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        apply_factor(values[half], result);
        add_bias(values[half], result, column + half * 32);
        uint32 pairs[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            pairs[i] = to_bf16_pair(__uint_as_float(values[half][2 * i]),
                                    __uint_as_float(values[half][2 * i + 1]));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            subtile[half * 4 + i] = make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2],
                                             pairs[4 * i + 3]);
        }
    }
}

// Stores a subtile of 32 rows from (row, column) on; the 16-byte units of a row in `staged` are
// permuted by the row index modulo eight.
template <typename Element>
__device__ __forceinline__ void write_subtile(const TileResult<Element>& result, int32 row,
                                             int32 column, const uint8* staged) {
    constexpr int kElements = 16 / sizeof(Element);
    const int32 lane = threadIdx.x % 32;
    Element* first = result.data + static_cast<int64>(row) * result.columns + column;
    if (result.columns % kElements == 0) {
        const int32 unit = lane % 8;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int32 r = i * 4 + lane / 8;
            if (row + r < result.rows && column + unit * kElements < result.columns) {
                uint4 value =
                    *reinterpret_cast<const uint4*>(staged + r * 128 + (unit ^ (r & 7)) * 16);
                auto* target = reinterpret_cast<uint4*>(
                    first + static_cast<int64>(r) * result.columns + unit * kElements);
                if constexpr (sizeof(Element) == 4) {
                    if (result.accumulate) {
                        value = add_f32x4(*target, value);
                    }
                }
                *target = value;
            }
        }
    } else {
        constexpr int kSubtileColumns = 128 / sizeof(Element);
        for (int32 i = lane; i < 32 * kSubtileColumns; i += 32) {
            const int32 r = i / kSubtileColumns;
            const int32 c = i % kSubtileColumns;
            if (row + r < result.rows && column + c < result.columns) {
                const uint8* unit = staged + r * 128 + ((c / kElements) ^ (r & 7)) * 16;
                Element value = reinterpret_cast<const Element*>(unit)[c % kElements];
                Element* target = first + static_cast<int64>(r) * result.columns + c;
                if constexpr (sizeof(Element) == 4) {
                    if (result.accumulate) {
                        value = *target + value;
                    }
                }
                *target = value;
            }
        }
    }
}

// Stores the calling warp's 32 rows of a tile of `kColumns`, which begin at (row, column) of the
// result and at `address`, the warp's first lane, of tensor memory. `staged` has 4 KiB for this
// warp alone. If `backwards`, the last columns are stored first. `release` is called after
// `kReleased` subtiles of tensor memory have been read.
template <int kColumns, int kReleased, template <typename> class Result, typename Element,
          typename Release>
__device__ __forceinline__ void store_tensor_tile(const Result<Element>& result, int32 row,
                                                  int32 column, uint32 address, bool backwards,
                                                  uint8* staged, Release release) {
    constexpr int kSubtileColumns = 128 / sizeof(Element);
    constexpr int kSubtiles = kColumns / kSubtileColumns;
    const int32 lane = threadIdx.x % 32;
#pragma unroll 1
    for (int32 i = 0; i < kSubtiles; ++i) {
        const int32 at = (backwards ? kSubtiles - 1 - i : i) * kSubtileColumns;
        uint4 subtile[8];
        load_subtile(subtile, address + at, result, column + at);
        if (i + 1 == kReleased) {
            release();
        }
        __syncwarp();
#pragma unroll
        for (int unit = 0; unit < 8; ++unit) {
            *reinterpret_cast<uint4*>(staged + lane * 128 + (unit ^ (lane & 7)) * 16) =
                subtile[unit];
        }
        __syncwarp();
        write_subtile(result, row, column + at, staged);
    }
}

// Number of subtiles, of `kSubtiles` of a tile, after which the overlap of both accumulators has
// been read: it is the end of the first and the beginning of the second accumulator.
template <typename S, int kSubtiles>
constexpr int kReleasedSubtiles =
    S::kShares ? (S::kOverlap * kSubtiles + S::kTileN - 1) / S::kTileN : kSubtiles;

// Epilogue warps: `store(tile, own_row, address, backwards, staged, release)` stores the 32 rows of
// a warp of each tile, from row `own_row` of the tile on, as store_tensor_tile does.
template <typename S, typename Tiles, typename Store>
__device__ __forceinline__ void take_tensor_tiles(const sm100::Shared<S>& shared,
                                                  uint32 tensor_base, Tiles tiles, Store store) {
    const uint32 quarter = threadIdx.x / 32 - sm100::kFirstEpilogueWarp;
    const uint32 own_row = sm100::rank_in_pair<S>() * sm100::kBlockM + quarter * 32;
    const uint32 lanes = quarter * 32 << 16;
    uint8* staged = shared.staged + quarter * (32 * 128);
    sm100::PipelineState<sm100::kAccumulators> state;
    sm100::PipelineState<S::kEmptyBarriers> empties;
    for (typename Tiles::Tile tile; tiles.next(tile);) {
        // redundant acquire of mbarrier.wait: the fence is enough for tensor memory
        sm100::wait<S>(shared.accumulator_full + state.index, state.phase);
        tcgen05_fence_after_barrier();
        const uint32 address = tensor_base + lanes + state.index * S::kAccumulatorStride;
        const bool backwards = S::kShares && state.index == 0;
        store(tile, own_row, address, backwards, staged, [&] {
            tcgen05_fence_before_barrier();
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                // redundant release of mbarrier.arrive: the fence is enough for tensor memory
                sm100::arrive_at_first<S>(shared.accumulator_empty + empties.index);
            }
        });
        state.advance();
        empties.advance();
    }
}

// Epilogue warps: stores all tiles.
template <typename S, typename Tiles, template <typename> class Result, typename Element>
__device__ __forceinline__ void store_tensor_tiles(const sm100::Shared<S>& shared,
                                                   uint32 tensor_base, Tiles tiles,
                                                   const Result<Element>& result) {
    constexpr int kSubtiles = S::kTileN * sizeof(Element) / 128;
    take_tensor_tiles(shared, tensor_base, tiles,
                      [&](const TilePlace& place, uint32 own_row, uint32 address, bool backwards,
                          uint8* staged, auto release) {
                          store_tensor_tile<S::kTileN, kReleasedSubtiles<S, kSubtiles>>(
                              result, place.row + own_row, place.column, address, backwards,
                              staged, release);
                      });
}
