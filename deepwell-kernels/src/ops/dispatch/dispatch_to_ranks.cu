// Computes the row of each pair of token and expert, with rows divided among ranks that have
// `of_rank` experts each. Slab p, the rows from p * slab on, begins with the pairs of rank p's
// experts, sorted by expert and then by pair; the rest of the slab is empty.
//
//   rows   [pairs]               the row of each pair, -1 beyond the capacity of the expert
//   pairs  [ranks * slab]        the pair of each row, -1 for an empty row
//   wanted [ranks * slab, top_k] the expert of each row, counted from its rank's first expert, in
//                                the column of the pair's choice; -1 elsewhere
//
// Runs after `dispatch_count` of dispatch.cu for groups without padding, which has counted and has
// initialized all rows and pairs to -1. `wanted` is initialized to -1.
//
// architectures: sm_90a sm_100a sm_103a sm_120a
#include "common/types.cuh"
#include "layout/expert_parts.cuh"

constexpr uint32 kThreads = 256;

// offsets [experts + 1] and counts [runs, experts] as written by `dispatch_count`, with the same
// runs.
extern "C" __global__ void __launch_bounds__(kThreads)
    dispatch_place_to_ranks(const int32* __restrict__ chosen, const int32* __restrict__ offsets,
                            int32* __restrict__ rows, int32* __restrict__ pairs,
                            int32* __restrict__ wanted, const uint32* __restrict__ counts,
                            uint32 pair_count, uint32 experts, uint32 of_rank, uint32 slab,
                            uint32 top_k, uint32 capacity, uint32 run, uint32 across) {
    const Parts<kThreads> parts(across);
    const Segment segment(parts, pair_count, run);
    for (uint32 first = 0; first < experts; first += across) {
        const uint32 expert = first + parts.expert;
        uint32 count = 0;
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32) { ++count; });
        const uint32 before = sum_of_parts(parts, count).before;
        if (expert >= experts) {
            continue;
        }
        uint32 ahead = counts[uint64{blockIdx.x} * experts + expert] + before;
        const uint32 rank = expert / of_rank;
        const uint32 in_slab = offsets[expert] - offsets[rank * of_rank];
        pairs_of(expert, chosen, segment.first, segment.end, [&](uint32 pair) {
            // A slab is long enough if the experts of a token differ.
            if (ahead < capacity && in_slab + ahead < slab) {
                const uint32 row = rank * slab + in_slab + ahead;
                rows[pair] = row;
                pairs[row] = pair;
                wanted[uint64{row} * top_k + pair % top_k] = expert - rank * of_rank;
            }
            ++ahead;
        });
    }
}
