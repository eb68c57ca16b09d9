// Products of small matrices that lie in the first-level cache, summed in registers.
#pragma once

#include "attention_vector.h"

namespace prejit::attention {

// C = [C +] A B. A: [rows, depth]; B: [depth, columns]; C: [rows, columns], columns whole vectors.
struct Product {
  int64_t depth;
  const float* a;
  int64_t a_stride;
  const float* b;
  int64_t b_stride;
  float* c;
  int64_t c_stride;
  bool add;
};

// Multiplies R rows of A with N vectors of columns: R * N sums stay in registers.
template <int R, int N>
PREJIT_INLINE void multiply_block(const Product& p, int64_t row, int64_t column) {
  Floats total[R][N] = {};
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + column;
  for (int64_t i = 0; i < p.depth; ++i) {
    Floats line[N];
    for (int n = 0; n < N; ++n) line[n] = load(b + i * p.b_stride + n * kLanes);
    for (int r = 0; r < R; ++r) {
      const Floats factor = splat(a[r * p.a_stride + i]);
      for (int n = 0; n < N; ++n) total[r][n] += factor * line[n];
    }
  }
  for (int r = 0; r < R; ++r) {
    float* c = p.c + (row + r) * p.c_stride + column;
    for (int n = 0; n < N; ++n) {
      store(c + n * kLanes, p.add ? load(c + n * kLanes) + total[r][n] : total[r][n]);
    }
  }
}

template <int N>
static void multiply_columns(const Product& p, int64_t rows, int64_t column) {
  int64_t row = 0;
  for (; row + 6 <= rows; row += 6) multiply_block<6, N>(p, row, column);
  for (; row + 4 <= rows; row += 4) multiply_block<4, N>(p, row, column);
  for (; row + 2 <= rows; row += 2) multiply_block<2, N>(p, row, column);
  if (row < rows) multiply_block<1, N>(p, row, column);
}

static void multiply(const Product& p, int64_t rows, int64_t columns) {
  constexpr int kWide = kLanes == 16 ? 4 : 2;  // with 6 rows the sums fill 24 of 32 registers, or 12 of 16
  int64_t column = 0;
  if (rows == 1) {  // one row needs more columns, or each addition waits for the one before
    for (; column + 8 * kLanes <= columns; column += 8 * kLanes) multiply_block<1, 8>(p, 0, column);
  }
  for (; column + kWide * kLanes <= columns; column += kWide * kLanes) {
    multiply_columns<kWide>(p, rows, column);
  }
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) multiply_columns<2>(p, rows, column);
  if (column < columns) multiply_columns<1>(p, rows, column);
}

}  // namespace prejit::attention
