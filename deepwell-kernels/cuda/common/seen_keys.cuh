// Keys that a query sees, further to the causal mask, if attention has windows or separates
// documents.
#pragma once

#include "common/types.cuh"

// Keys seen within a sequence of `seq` tokens that begins at token `first_token` of the batch. A
// query sees its own key and the keys before it, `window` keys in all, of its own document alone.
// `documents` [tokens, 2] holds the begin and the end of each token's document within the sequence;
// null if documents are joined.
struct SeenKeys {
    const int32* documents;
    int32 seq;
    int32 window;  // at most `seq`, and equal to `seq` without a window

    // Returns the first key that a query sees; `query` may be one beyond the sequence.
    __device__ __forceinline__ int32 first_seen(uint32 first_token, int32 query) const {
        const int32 first = query + 1 - window;
        return documents == nullptr ? first : max(first, bound(first_token, query, 0));
    }

    // Returns the last query that sees a key; `key` may be one beyond the sequence.
    __device__ __forceinline__ int32 last_seeing(uint32 first_token, int32 key) const {
        const int32 last = key + window - 1;
        return documents == nullptr ? last : min(last, bound(first_token, key, 1) - 1);
    }

  private:
    // Returns the begin of a token's document (0), or one past its last token (1).
    __device__ __forceinline__ int32 bound(uint32 first_token, int32 token, int which) const {
        const int32 row = min(token, seq - 1);
        return documents[2 * static_cast<uint64>(first_token + row) + which];
    }
};
