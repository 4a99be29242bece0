// Keys of one rank seen by queries of another rank; each rank has two chunks of a sequence.
#pragma once

#include "common/opaque.cuh"
#include "common/types.cuh"

// Mask over the tokens that two ranks hold of a sequence: queries before `first_query` see no key;
// later queries see the keys before `keys`, subject to the causal mask, and of these the keys
// within `window` tokens of the query in the whole sequence. Tokens of a rank are in the order of
// their positions, so that the keys of a query, and the queries of a key, are consecutive.
struct SeenPart {
    int32 first_query;
    int32 keys;
    // For extended kernels. Without a window, more than all tokens of a sequence.
    int32 window;
    // Positions of the first tokens of both chunks, for queries and for keys.
    int32 query_low;
    int32 query_high;
    int32 key_low;
    int32 key_high;

    // Returns how many keys a query sees, given that the mask leaves the first `seen` keys.
    __device__ __forceinline__ int32 seen(int32 query, int32 seen) const {
        return query < first_query ? 0 : min(seen, keys);
    }

    // Returns the first query that sees a key; INT32_MAX if no query does.
    __device__ __forceinline__ int32 first_seeing(int32 key, bool causal) const {
        return key >= keys ? 0x7fffffff : max(first_query, causal ? key : 0);
    }

    // Returns the first key in the window of a query, of `seq` tokens of each rank.
    __device__ __forceinline__ int32 first_in_window(int32 query, int32 seq) const {
        // Opaque: too few registers to keep what depends on the sequence alone.
        const int32 tokens = static_cast<int32>(opaque(seq));
        const int32 position = position_of(query, tokens, query_low, query_high);
        return tokens_before(position + 1 - window, tokens, key_low, key_high);
    }

    // Returns the last query whose window has a key; -1 if there is none.
    __device__ __forceinline__ int32 last_with_window(int32 key, int32 seq) const {
        const int32 tokens = static_cast<int32>(opaque(seq));
        const int32 position = position_of(key, tokens, key_low, key_high);
        return tokens_before(position + window, tokens, query_low, query_high) - 1;
    }

  private:
    static __device__ __forceinline__ int32 position_of(int32 token, int32 seq, int32 low,
                                                        int32 high) {
        const int32 half = seq / 2;
        return token < half ? low + token : high + token - half;
    }

    // Returns how many tokens of a rank are before a position of the whole sequence.
    static __device__ __forceinline__ int32 tokens_before(int32 position, int32 seq, int32 low,
                                                          int32 high) {
        const int32 half = seq / 2;
        return min(max(position - low, 0), half) + min(max(position - high, 0), seq - half);
    }
};
