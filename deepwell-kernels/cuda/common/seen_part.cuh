// Which of a rank's keys queries of another rank see, where each has two chunks of a sequence.
#pragma once

#include "common/types.cuh"

// Of the tokens that a rank has of a sequence: queries before `first_query` see no key, the others
// those before `keys`, as far as a causal mask leaves them.
struct SeenPart {
    int32 first_query;
    int32 keys;

    // How many keys a query sees of the first `seen`, which are those before the mask.
    __device__ __forceinline__ int32 seen(int32 query, int32 seen) const {
        return query < first_query ? 0 : min(seen, keys);
    }

    // The first query that sees a key; beyond all where none does.
    __device__ __forceinline__ int32 first_seeing(int32 key, bool causal) const {
        return key >= keys ? 0x7fffffff : max(first_query, causal ? key : 0);
    }
};
