// Norms along the last axis of x: layer norm (Ba et al. 2016) and RMS norm (Zhang and Sennrich 2019).
#pragma once

#include <cstdint>

namespace prejit {

struct Norm {
  int64_t rows = 0;
  int64_t width = 0;
  const float* x = nullptr;       // [rows, width]
  const float* weight = nullptr;  // [width]
  const float* bias = nullptr;    // [width], or null.
  bool centred = false;           // Layer norm subtracts the mean, RMS norm does not.
  float epsilon = 0;
  float offset = 0;    // Added to the weight.
  float* y = nullptr;  // [rows, width]
};

// Computes y on this thread and the helpers.
void norm(const Norm& n);

// Computes the norm of one row, [width]; y may be x.
void norm_row(const Norm& n, const float* x, float* y);

}  // namespace prejit
