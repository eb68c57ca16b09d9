// Attention of an encoder: every token to all valid tokens of its sentence.
//
// Shapes: B batch, T tokens, N heads, H head size.
#pragma once

#include <cstdint>

namespace prejit::attention {

// Arrays are dense, row-major, float32 [B, T, N, H].
struct EncoderCall {
  int64_t batch, tokens, heads, size;
  const float* query;
  const float* keys;
  const float* values;
  const int32_t* length;  // [B], number of valid tokens
  float* out;
  float scale;  // factor of the queries
};

// Padding is not read, and its results are zeros. Returns false if memory is exhausted.
bool attend_encoder(const EncoderCall& call);

}  // namespace prejit::attention
