// Chooses the next token of each row, as lowering/sampling_programs.py says, which has the same in XLA's operations.
#pragma once

#include <cstdint>

namespace prejit {

struct Choice {
  int64_t rows = 0;
  int64_t width = 0;
  const float* logits = nullptr;       // [rows, width], after penalties
  const float* bias = nullptr;         // [rows, width], added to them
  const float* temperature = nullptr;  // [rows]; 0 takes the first largest
  const int32_t* top_k = nullptr;      // [rows]; 0 keeps all
  const float* top_p = nullptr;        // [rows]; 1 keeps all
  const float* min_p = nullptr;        // [rows]; 0 keeps all
  const uint32_t* seed = nullptr;      // [rows, 2]
  const int32_t* position = nullptr;   // [rows]
  int32_t* token = nullptr;            // [rows]; -1 if a sum is NaN, or the largest one is infinite
};

// Computes `token` on this thread and the helpers. Returns false if memory is exhausted.
bool choose(const Choice& c);

}  // namespace prejit
