// The first largest value of each row: a greedy choice of the next token.
#pragma once

#include <cstdint>

namespace prejit {

struct FirstLargest {
  int64_t rows = 0;
  int64_t width = 0;
  const float* values = nullptr;  // [rows, width]
  const float* bias = nullptr;    // [rows, width], added to the values
  int32_t* at = nullptr;          // [rows], where it is; `width` if a sum is NaN, or the largest one is infinite
};

// Computes `at` on this thread and the helpers. Returns false if memory is exhausted.
bool first_largest(const FirstLargest& f);

}  // namespace prejit
