// Keys of one rank seen by queries of another rank; each rank has two chunks of a sequence.
#pragma once

#include "common/types.cuh"

// Mask over the tokens that two ranks hold of a sequence: queries before `first_query` see no key;
// later queries see the keys before `keys`, subject to the causal mask.
struct SeenPart {
    int32 first_query;
    int32 keys;

    // Returns how many keys a query sees, given that the mask leaves the first `seen` keys.
    __device__ __forceinline__ int32 seen(int32 query, int32 seen) const {
        return query < first_query ? 0 : min(seen, keys);
    }

    // Returns the first query that sees a key; INT32_MAX if no query does.
    __device__ __forceinline__ int32 first_seeing(int32 key, bool causal) const {
        return key >= keys ? 0x7fffffff : max(first_query, causal ? key : 0);
    }
};
