// Attention of an encoder: every token to all valid tokens of its sentence.
//
// Shapes: B batch, T tokens, N heads, H head size, S sentences.
#pragma once

#include <cstdint>

namespace prejit::attention {

// Arrays are dense, row-major, float32 [B, T, N, H]. A row is a sentence and its padding, or with B = 1 all sentences, one
// after the other, and padding. Both are the same with one sentence.
struct EncoderCall {
  int64_t batch, tokens, heads, size;
  const float* query;
  const float* keys;
  const float* values;
  const int32_t* length;  // [S], number of valid tokens
  float* out;
  float scale;        // factor of the queries
  int64_t sentences;  // B, or with B = 1 any number
  bool rounds;        // query, keys, values and weights are rounded to bfloat16
};

// Padding is not read, and its results are zeros. Returns false if memory is exhausted.
bool attend_encoder(const EncoderCall& call);

}  // namespace prejit::attention
