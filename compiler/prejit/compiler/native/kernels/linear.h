// y = act(x W^T * scale + bias) [* (x U^T * uscale + ubias)] [+ residual], for weights as they are stored.
//
// Where weights are bfloat16 or int8, x is rounded to bfloat16, to the nearest and to even, and sums are float32: on
// every CPU and for any number of rows, so that all give the same but for the order of the sums. With float32 weights
// all is float32. XLA's forms of a product beside this one round x likewise (models/decoder.py, dot).
//
// A row's sums have one order among few rows and one among many, whatever the others are. Many rows begin at 8 with
// AMX, at 24 with vdpbf16ps (linear_bf16.h), else at 128 rows or 32 positions of a sequence (linear.cc).
#pragma once

#include <cstdint>

#include "activation.h"

namespace prejit {

enum class Dtype { kFloat32, kBfloat16, kInt8 };

// W, [N, K] row-major, a row an output.
struct Weights {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  const float* scale = nullptr;  // [N], with int8 only.
  const float* bias = nullptr;   // [N], or none.
};

struct Linear {
  int64_t rows = 0;     // M
  int64_t positions = 1;  // How many of the rows, next to each other, are of one sequence.
  int64_t inputs = 0;   // K
  int64_t outputs = 0;  // N
  const float* x = nullptr;  // [M, K]
  Weights weights;
  bool gated = false;
  Weights up;                        // Where gated; of the same dtype.
  const float* residual = nullptr;   // [M, N], or none.
  Activation activation = Activation::kNone;
  float* y = nullptr;  // [M, N]
};

// Computes y on this thread and the helpers. Returns whether memory for the panels was there.
bool linear(const Linear& product);

}  // namespace prejit
