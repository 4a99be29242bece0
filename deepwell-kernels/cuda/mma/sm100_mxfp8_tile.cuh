// Tiles of a product of two MXFP8 matrices, both stored by depth, on tcgen05: the shape of a tile,
// how shared and tensor memory are divided, and the three roles that fill an accumulator.
//
// One block computes 128 x kTileN, or a pair of blocks 256 x kTileN of which each holds 128 rows;
// then each reads its rows of a and half of the rows of b, and the first multiplies for both.
// Depth passes in pieces of 128 through a ring of stages:
//   fetch_codes    one thread has boxes of codes copied, swizzled by 128 bytes;
//   fetch_scales   a warp for each operand reads scales where they lie, by rows, four pieces ahead,
//                  and writes them as the tiles of 512 bytes that tcgen05.cp takes;
//   multiply       one thread copies scales to tensor memory and multiplies.
// Each walks the same tiles in the same order. Copies of scales and products of one thread run in
// the order in which it asks for them, so one place for scales serves all stages.
#pragma once

#include "common/types.cuh"
#include "layout/tcgen05_descriptor.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tcgen05.cuh"
#include "ptx/tensor_copy.cuh"

namespace sm100_mxfp8 {

constexpr int kBlockM = 128;
constexpr int kBlockK = 128;
constexpr int kScaleBlock = 32;
constexpr int kSteps = kBlockK / kScaleBlock;
constexpr int kScaleRows = 128;       // of a scale tile
constexpr int kScaleTileBytes = 512;  // four scales of each row
constexpr int kScaleTileColumns = 4;  // in tensor memory
constexpr int kScaleWarps = 2;        // one for each operand
constexpr int kEpilogueWarps = 4;
constexpr int kTensorColumns = 512;
constexpr int kSharedLimit = 227 * 1024;
constexpr int kStagedBytes = kEpilogueWarps * 32 * 128;  // results on their way out
constexpr int kBarrierBytes = 256;
constexpr int kAlignment = 1024;
constexpr uint32 kUnitScales = 0x7f7f7f7fu;  // four scales of one

template <int kBlocksOfPair, int kTileColumns>
struct Shape {
    static constexpr int kBlocks = kBlocksOfPair;  // that compute a tile together
    static constexpr int kTileM = kBlocks * kBlockM;
    static constexpr int kTileN = kTileColumns;
    static constexpr int kBlockN = kTileN / kBlocks;  // rows of b that a block reads
    static constexpr int kScaleTiles = 1 + kTileN / kScaleRows;
    static constexpr int kScaleColumns = kScaleTiles * kScaleTileColumns;
    static constexpr int kAccumulators = 2 * kTileN + kScaleColumns <= kTensorColumns ? 2 : 1;
    static constexpr int kCodeBytes = (kBlockM + kBlockN) * kBlockK;  // of a stage
    static constexpr int kScaleBytes = kScaleTiles * kScaleTileBytes;
    static constexpr int kStages = (kSharedLimit - kAlignment - kStagedBytes - kBarrierBytes) /
                                   (kCodeBytes + kScaleBytes);
    static constexpr int kSharedBytes =
        kAlignment + kStages * (kCodeBytes + kScaleBytes) + kStagedBytes + kBarrierBytes;

    static_assert(kBlocks == 1 || kBlocks == 2, "a block or a pair");
    static_assert(kTileN % kScaleRows == 0 && kTileN <= 256, "scale tiles, and what tcgen05 takes");
    static_assert(kAccumulators * kTileN + kScaleColumns <= kTensorColumns,
                  "accumulators and scales fit tensor memory");
    static_assert(kStages >= 3 && kSharedBytes <= kSharedLimit, "shared memory");
    static_assert((2 * kStages + 2 * kAccumulators) * 8 + 8 <= kBarrierBytes, "barriers");
};

// Shared memory from a 1024-byte boundary on, in the same places in both blocks of a pair.
template <typename S>
struct Shared {
    uint8* codes;        // [kStages][kBlockM + kBlockN][128], swizzled
    uint8* scales;       // [kStages][kScaleTiles][512], those of a first
    uint8* staged;       // [kEpilogueWarps][32][128]
    uint64* full;        // [kStages] codes and scales are there; of the first block
    uint64* empty;       // [kStages] the stage is read
    uint64* done;        // [kAccumulators] the accumulator is complete
    uint64* drained;     // [kAccumulators] it is read; of the first block
    uint32* tensor_base;

    __device__ __forceinline__ explicit Shared(uint8* memory) {
        const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(memory));
        codes = memory + (-address & (kAlignment - 1));
        scales = codes + S::kStages * S::kCodeBytes;
        staged = scales + S::kStages * S::kScaleBytes;
        full = reinterpret_cast<uint64*>(staged + kStagedBytes);
        empty = full + S::kStages;
        done = empty + S::kStages;
        drained = done + S::kAccumulators;
        tensor_base = reinterpret_cast<uint32*>(drained + S::kAccumulators);
    }

    // By one thread of each block.
    __device__ __forceinline__ void init_barriers() const {
        for (int i = 0; i < S::kStages; ++i) {
            mbarrier_init(full + i, 1 + kScaleWarps * S::kBlocks);
            mbarrier_init(empty + i);
        }
        for (int i = 0; i < S::kAccumulators; ++i) {
            mbarrier_init(done + i);
            mbarrier_init(drained + i, kEpilogueWarps * S::kBlocks);
        }
    }
};

// A place in a ring of `kLength` and the phase of its barriers.
template <int kLength>
struct Ring {
    uint32 index = 0;
    uint32 phase = 0;

    __device__ __forceinline__ void advance() {
        if (++index == kLength) {
            index = 0;
            phase ^= 1;
        }
    }
};

template <typename S>
__device__ __forceinline__ void wait(uint64* barrier, uint32 phase) {
    if constexpr (S::kBlocks == 1) {
        mbarrier_wait(barrier, phase);
    } else {
        mbarrier_wait_cluster(barrier, phase);
    }
}

// Arrives at a barrier of the first block of a pair.
template <typename S>
__device__ __forceinline__ void arrive_at_first(uint64* barrier) {
    if constexpr (S::kBlocks == 1) {
        mbarrier_arrive(barrier);
    } else {
        mbarrier_arrive_cluster(cluster_address(mbarrier_address(barrier), 0));
    }
}

// An operand's scales [rows, blocks], by rows.
struct Scales {
    const uint8* data;
    int32 rows;
    int32 blocks;
};

// Scales 16 * group to 16 * group + 15 of a row, four to a word; ones where there are none.
__device__ __forceinline__ uint4 scale_group(const Scales& scales, int32 row, int32 group) {
    uint32 words[4] = {kUnitScales, kUnitScales, kUnitScales, kUnitScales};
    if (row < scales.rows) {
        const uint8* first = scales.data + static_cast<int64>(row) * scales.blocks + group * 16;
        const int32 left = scales.blocks - group * 16;
        if (scales.blocks % 16 == 0) {
            return __ldg(reinterpret_cast<const uint4*>(first));
        }
        if (scales.blocks % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (4 * i < left) {
                    words[i] = __ldg(reinterpret_cast<const uint32*>(first) + i);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i < left) {
                    const uint32 code = __ldg(first + i);
                    words[i / 4] ^= (code ^ 0x7f) << (8 * (i % 4));
                }
            }
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ uint32 word_of(const uint4& words, int index) {
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Scales of kTiles * 128 rows for four pieces of depth: the calling lane's rows of each scale tile.
template <int kTiles>
struct ScaleWords {
    uint4 words[kTiles][4];

    __device__ __forceinline__ void load(const Scales& scales, int32 row, int32 group) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int32 at = row + tile * kScaleRows + i * 32 + threadIdx.x % 32;
                words[tile][i] = scale_group(scales, at, group);
            }
        }
    }
};

// The scales of one operand, by one warp: `row_of(tile)` is the tile's first row of it, and its
// scale tiles are number kFirst and following of a stage.
template <typename S, int kFirst, int kTiles, typename Row>
__device__ __forceinline__ void fetch_scales(const Shared<S>& shared, const Scales& scales,
                                             int32 depth_pieces, uint32 first_tile,
                                             uint32 tile_stride, uint32 tiles, Row row_of) {
    const uint32 lane = threadIdx.x % 32;
    const int32 groups = (depth_pieces + 3) / 4;
    Ring<S::kStages> ring;
    for (uint32 tile = first_tile; tile < tiles; tile += tile_stride) {
        const int32 row = row_of(tile);
        ScaleWords<kTiles> next;
        next.load(scales, row, 0);
        for (int32 group = 0; group < groups; ++group) {
            const ScaleWords<kTiles> current = next;
            if (group + 1 < groups) {
                next.load(scales, row, group + 1);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (group * 4 + i < depth_pieces) {
                    wait<S>(shared.empty + ring.index, ring.phase ^ 1);
                    uint8* target = shared.scales + ring.index * S::kScaleBytes +
                                    kFirst * kScaleTileBytes + lane * 16;
#pragma unroll
                    for (int j = 0; j < kTiles; ++j) {
                        *reinterpret_cast<uint4*>(target + j * kScaleTileBytes) =
                            make_uint4(word_of(current.words[j][0], i),
                                       word_of(current.words[j][1], i),
                                       word_of(current.words[j][2], i),
                                       word_of(current.words[j][3], i));
                    }
                    fence_before_copies();
                    __syncwarp();
                    if (lane == 0) {
                        arrive_at_first<S>(shared.full + ring.index);
                    }
                    ring.advance();
                }
            }
        }
    }
}

// The codes of both operands, by one thread of each block. `place_of(tile)` is the tile's first row
// and column of the result.
template <typename S, typename Place>
__device__ __forceinline__ void fetch_codes(const Shared<S>& shared, const TensorMap& a,
                                            const TensorMap& b, int32 depth_pieces,
                                            uint32 first_tile, uint32 tile_stride, uint32 tiles,
                                            Place place_of) {
    const uint32 rank = S::kBlocks == 1 ? 0 : cluster_rank();
    Ring<S::kStages> ring;
    for (uint32 tile = first_tile; tile < tiles; tile += tile_stride) {
        const auto place = place_of(tile);
        const uint32 a_row = place.row + rank * kBlockM;
        const uint32 b_row = place.column + rank * S::kBlockN;
        for (int32 piece = 0; piece < depth_pieces; ++piece) {
            wait<S>(shared.empty + ring.index, ring.phase ^ 1);
            uint8* a_codes = shared.codes + ring.index * S::kCodeBytes;
            uint8* b_codes = a_codes + kBlockM * kBlockK;
            uint64* full = shared.full + ring.index;
            // The first block announces what both copy.
            if (rank == 0) {
                mbarrier_expect(full, S::kBlocks * S::kCodeBytes);
            }
            if constexpr (S::kBlocks == 1) {
                tensor_copy_2d(a_codes, a, piece * kBlockK, a_row, full);
                tensor_copy_2d(b_codes, b, piece * kBlockK, b_row, full);
            } else {
                const uint32 first = cluster_address(mbarrier_address(full), 0);
                tensor_copy_2d_pair(a_codes, a, piece * kBlockK, a_row, first);
                tensor_copy_2d_pair(b_codes, b, piece * kBlockK, b_row, first);
            }
            ring.advance();
        }
    }
    // Nobody ends while arrivals for it are on their way.
    for (int i = 0; i < S::kStages; ++i) {
        wait<S>(shared.empty + ring.index, ring.phase ^ 1);
        ring.advance();
    }
}

// The products, by one thread (of the first block of a pair). Accumulator i begins at column
// i * kTileN of tensor memory; scales come after the last.
template <typename S>
__device__ __forceinline__ void multiply(const Shared<S>& shared, uint32 tensor_base,
                                         int32 depth_pieces, uint32 first_tile,
                                         uint32 tile_stride, uint32 tiles) {
    const uint32 a_scales = tensor_base + S::kAccumulators * S::kTileN;
    const uint32 b_scales = a_scales + kScaleTileColumns;
    const uint32 codes = static_cast<uint32>(__cvta_generic_to_shared(shared.codes));
    const uint32 scales = static_cast<uint32>(__cvta_generic_to_shared(shared.scales));
    Ring<S::kStages> ring;
    Ring<S::kAccumulators> accumulators;
    for (uint32 tile = first_tile; tile < tiles; tile += tile_stride) {
        wait<S>(shared.drained + accumulators.index, accumulators.phase ^ 1);
        tcgen05_fence_after_barrier();
        const uint32 target = tensor_base + accumulators.index * S::kTileN;
        for (int32 piece = 0; piece < depth_pieces; ++piece) {
            wait<S>(shared.full + ring.index, ring.phase);
            tcgen05_fence_after_barrier();
#pragma unroll
            for (int i = 0; i < S::kScaleTiles; ++i) {
                const uint32 source = scales + ring.index * S::kScaleBytes + i * kScaleTileBytes;
                tcgen05_copy_to_all_warps<S::kBlocks>(a_scales + i * kScaleTileColumns,
                                                      tcgen05_scale_tile(source));
            }
            const uint32 a_codes = codes + ring.index * S::kCodeBytes;
            const uint32 b_codes = a_codes + kBlockM * kBlockK;
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                tcgen05_multiply_mxf8<S::kBlocks>(
                    target, tcgen05_swizzled_matrix(a_codes + step * kScaleBlock),
                    tcgen05_swizzled_matrix(b_codes + step * kScaleBlock),
                    tcgen05_mxf8_instruction(S::kTileM, S::kTileN, step), a_scales, b_scales,
                    piece > 0 || step > 0);
            }
            tcgen05_commit<S::kBlocks>(shared.empty + ring.index);
            ring.advance();
        }
        tcgen05_commit<S::kBlocks>(shared.done + accumulators.index);
        accumulators.advance();
    }
}

}  // namespace sm100_mxfp8
