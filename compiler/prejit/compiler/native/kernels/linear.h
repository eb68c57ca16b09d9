// y = act(x W^T * scale + bias) [* (x U^T * uscale + ubias)] [+ residual], for weights as they are stored.
//
// If weights are bfloat16 or MXFP4, x is rounded to bfloat16, to nearest and ties to even, and sums are float32: on every
// CPU and for any number of rows, so that results differ in the order of the sums only. XLA's forms of a product in
// programs with kernels round x in the same way (models/layers/linear.py, dot). With float32 weights everything is float32.
// int8 rounds x to 16 bits, or linear_by_integers() to 8, and sums exactly (linear_integers.h), unless it has so many inputs
// that sums would not fit; then it is as bfloat16. int4 rounds 32 inputs to int8 (linear_int4.h).
//
// The sums of a row have one order among few rows and another among many, whatever the other rows are. Many rows begin
// at 8 with AMX (linear_amx.h), else at 128 rows or 32 positions of a sequence (linear.cc). With AVX-512 BF16 the sums of
// bfloat16 weights have one order for any number of rows (linear_dot_bf16.h), or another one with `many_rows`; those of int8
// and int4 weights have one everywhere.
#pragma once

#include <cstdint>

#include "activation.h"

namespace prejit {

enum class Dtype { kFloat32, kBfloat16, kInt8, kInt4 };

// W, [N, K] row-major: each row is an output. int4 has an order of its own (linear_int4.h).
struct Weights {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;
  const float* scale = nullptr;  // [N] scales, with int8 only.
  const float* bias = nullptr;   // [N], or null.
  // float16, with int4 only: of groups of so many inputs, a multiple of 32.
  const uint16_t* group_scales = nullptr;
  int64_t group = 32;
  bool has_zeros = false;  // With zero points of groups beside them.
  bool is_e2m1 = false;    // int4 of experts: words hold floats (linear_int4.h), and group_scales are bfloat16.
};

struct Linear {
  int64_t rows = 0;     // M
  int64_t usual_rows = 0;  // If not 0, these choose the order of sums instead of `rows`, which may vary (experts.h).
  bool many_rows = false;  // The order of sums that suits many rows, for any number (linear_outputs_bf16.h).
  int64_t positions = 1;  // Number of adjacent rows that belong to one sequence.
  int64_t inputs = 0;   // K
  int64_t outputs = 0;  // N
  const float* x = nullptr;  // [M, K]
  Weights weights;
  bool gated = false;
  Weights up;                        // U, if gated; of the same dtype.
  const float* residual = nullptr;   // [M, N], or null.
  Activation activation = Activation::kNone;
  float* y = nullptr;  // [M, N]
};

// Computes y on this thread and the helpers. Returns false if memory is exhausted.
bool linear(const Linear& product);

}  // namespace prejit
