// Which keys a query sees beside what a causal mask leaves, where attention has windows or tells
// documents apart.
#pragma once

#include "common/types.cuh"

// Of a sequence of `seq` tokens, the first of which is `first_token` among all: a query sees the
// last `window` keys before it and itself, of its own document alone. `documents` [tokens, 2] has
// where the document of a token begins and ends in its sequence; null where they are joined.
struct SeenKeys {
    const int32* documents;
    int32 seq;
    int32 window;  // at most the keys of a sequence; those where there is none

    // The first key that a query sees; the query may be one beyond the sequence.
    __device__ __forceinline__ int32 first_seen(uint32 first_token, int32 query) const {
        const int32 first = query + 1 - window;
        return documents == nullptr ? first : max(first, bound(first_token, query, 0));
    }

    // The last query that sees a key, which may be one beyond the sequence.
    __device__ __forceinline__ int32 last_seeing(uint32 first_token, int32 key) const {
        const int32 last = key + window - 1;
        return documents == nullptr ? last : min(last, bound(first_token, key, 1) - 1);
    }

  private:
    // Where the document of a token begins (0), or one past its last token (1).
    __device__ __forceinline__ int32 bound(uint32 first_token, int32 token, int which) const {
        const int32 row = min(token, seq - 1);
        return documents[2 * static_cast<uint64>(first_token + row) + which];
    }
};
