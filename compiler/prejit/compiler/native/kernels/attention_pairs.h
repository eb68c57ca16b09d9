// Products of small matrices of bfloat16, like those of attention_multiply.h, with twice their terms an instruction.
#pragma once

#include "attention_multiply.h"
#include "linear_multiplier.h"
#include "pairs.h"

namespace prejit::attention {

// Whether scores and sums of bfloat16 are computed by pairs. It changes the order of sums only.
inline bool has_pairs() { return multiplier() == Multiplier::kAvx512Bf16; }

#if !defined(PREJIT_HAS_PAIRS)

PREJIT_INLINE void pack_pairs(float*, int64_t) {}
template <typename E>
PREJIT_INLINE void copy_pairs_transposed(const Rows<E>&, int64_t, int64_t, float*) {}
template <typename E>
PREJIT_INLINE void copy_paired_rows(const Rows<E>&, int64_t, float*) {}
inline void multiply_pairs(const Product&, int64_t, int64_t) {}

#else

#define PREJIT_PAIRS __attribute__((target("avx512bf16")))

// Packs `count` floats, whole vectors of bfloat16 values, into half as many pairs in place. Zeros follow.
PREJIT_INLINE void pack_pairs(float* row, int64_t count) {
  for (int64_t i = 0; i < count; i += 2 * kLanes) {
    store(row + i / 2, pairs_of(load(row + i), load_some(row + i + kLanes, count - i - kLanes)));
  }
}

// Copies rows as columns of pairs: element [h, s] are the numbers 2 h and 2 h + 1 of row s; zeros behind the last
// number of a row, and behind the last column up to a whole vector. Columns are `width` pairs apart.
template <typename E>
PREJIT_INLINE void copy_pairs_transposed(const Rows<E>& rows, int64_t size, int64_t width, float* to) {
  for (int64_t s = 0; s < rows.count; s += kLanes) {
    for (int64_t h = 0; h < size; h += 2 * kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        square[i] = s + i < rows.count ? load_pairs(rows.first + (s + i) * rows.stride + h, size - h) : Floats{};
        if (h == 0) rows.fetch_behind(s + i, size);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (h / 2 + i) * width + s, square[i]);
    }
  }
}

// Copies rows side by side: element [s, h] are number h of the rows 2 s and 2 s + 1; zeros in place of a last row
// that is missing, and behind the last number up to a whole vector.
template <typename E>
PREJIT_INLINE void copy_paired_rows(const Rows<E>& rows, int64_t size, float* to) {
  const E* from = rows.first;
  for (int64_t s = 0; s < rows.count; s += 2, from += 2 * rows.stride) {
    rows.fetch_behind(s, size);
    rows.fetch_behind(s + 1, size);
    for (int64_t h = 0; h < size; h += kLanes, to += kLanes) {
      // A bfloat16 is the upper half of what is loaded.
      const Bits first = reinterpret_cast<Bits>(widened(from, h, size, 1, true));
      const Floats next = s + 1 < rows.count ? widened(from + rows.stride, h, size, 1, true) : Floats{};
      store(to, reinterpret_cast<Floats>(first >> 16 | reinterpret_cast<Bits>(next)));
    }
  }
}

template <int R, int N>
PREJIT_PAIRS PREJIT_INLINE void multiply_pair_block(const Product& p, int64_t row, int64_t column) {
  __m512 total[R][N] = {};
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + column;
  for (int64_t i = 0; i < p.depth; ++i) {
    __m512bh line[N];
    for (int n = 0; n < N; ++n) line[n] = load_as<__m512bh>(b + i * p.b_stride + n * kLanes);
    for (int r = 0; r < R; ++r) {
      const __m512bh factor = reinterpret_cast<__m512bh>(_mm512_set1_ps(a[r * p.a_stride + i]));
      for (int n = 0; n < N; ++n) total[r][n] = _mm512_dpbf16_ps(total[r][n], factor, line[n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    float* c = p.c + (row + r) * p.c_stride + column;
    for (int n = 0; n < N; ++n) {
      const Floats sum = total[r][n];
      store(c + n * kLanes, p.add ? load(c + n * kLanes) + sum : sum);
    }
  }
}

template <int N>
PREJIT_PAIRS static void multiply_pair_columns(const Product& p, int64_t rows, int64_t column) {
  int64_t row = 0;
  for (; row + 6 <= rows; row += 6) multiply_pair_block<6, N>(p, row, column);
  for (; row + 2 <= rows; row += 2) multiply_pair_block<2, N>(p, row, column);
  if (row < rows) multiply_pair_block<1, N>(p, row, column);
}

// Multiplies as `multiply` does. A float of A or B is a pair, and the depth counts pairs.
static void multiply_pairs(const Product& p, int64_t rows, int64_t columns) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= columns; column += 4 * kLanes) multiply_pair_columns<4>(p, rows, column);
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) multiply_pair_columns<2>(p, rows, column);
  if (column < columns) multiply_pair_columns<1>(p, rows, column);
}

#endif

}  // namespace prejit::attention
