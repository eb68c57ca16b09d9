// Attention of new tokens to a decoder's cache, after these tokens are written into it.
//
// Shapes: B batch, Q queries of a row, T new tokens of a row, N query heads, K key/value heads, H head size, S cache
// positions.
#pragma once

#include <cstdint>

#include "norm.h"
#include "simd.h"

namespace prejit::attention {

// How heads turn by their position (Su et al. 2021): component i with i + P, or 2i with 2i + 1. Those from 2P on stay.
struct Turns {
  const float* cos = nullptr;  // [B, T, P]; null: heads do not turn
  const float* sin = nullptr;  // [B, T, P]
  int64_t pairs = 0;           // P
  bool interleaved = false;
};

// Arrays are row-major, and dense except as the last two fields allow. E is float, Bf16 or int8_t. Of int8_t the cache
// is [B, K, S, H + 4]: behind the H integers of a vector is their factor, a float32.
template <typename E>
struct DecoderCall {
  int64_t batch, queries, tokens, heads, kv_heads, size, slots;
  const float* query;            // [B, Q, N, H]
  const float* new_keys;         // [B, T, K, H]
  const float* new_values;       // [B, T, K, H]
  const int32_t* start;          // [B], position of the first new token
  const int32_t* length;         // [B], number of valid new tokens; 0: the row is idle
  const int32_t* query_start;    // [B], position of the first query
  E* keys;                       // [B, K, S, H]
  E* values;                     // [B, K, S, H]
  float* out;                    // [B, Q, N, H]
  float scale;                   // factor of the queries
  float cap;                     // soft bound of the scores; 0: none
  int64_t window;                // number of positions that a query sees, its own included; 0: all
  int64_t query_width = 0;       // heads from one position of query to the next; 0: N
  int64_t new_width = 0;         // heads from one position of new_keys, and new_values, to the next; 0: K
  Norm query_norm = {};          // RMS norm of each query head before it turns; without a weight: none
  Norm key_norm = {};            // the same of each new key head
  Turns turns = {};              // of queries and of new keys
};

// Writes the valid new tokens into the cache, none at S or beyond, and attends to it: a query at position p sees 0 ..
// min(p, S - 1). With a cache of bfloat16 queries and weights are rounded to it. Queries behind the valid tokens, and
// idle rows, get zeros. Nothing is read behind the last position that a valid query sees. Returns false if memory is
// exhausted.
template <typename E>
bool attend_decoder(const DecoderCall<E>& call);

}  // namespace prejit::attention
