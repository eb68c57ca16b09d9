// Products of many rows: x and a panel of W are packed, transposed and widened to float32, and multiplied in tiles that
// stay in registers (after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).
#pragma once

#include "linear.h"
#include "simd.h"
#include "transpose.h"

namespace prejit {

constexpr int kPanel = 2 * kLanes;  // Outputs of a panel: two vectors.
// Rows of a tile at most; with two accumulators each, and what they are made of, they fill the registers.
constexpr int kTile = (kRegisters - 4) / 2;
// Inputs that are summed at once: a panel of them stays in L2, and float32 sums of few terms lose little.
constexpr int64_t kInputsAtOnce = 384;

// Floats of a packed tile of `height` rows: a whole vector is stored for the last input.
inline int64_t packed_tile_floats(int64_t inputs, int height) { return (inputs * height + kLanes + 15) / 16 * 16; }

// to[k, row] = x[row, k], rounded to bfloat16 where asked for: tiles of `height` rows, of which the last may have fewer,
// `count` of them.
template <bool rounds>
inline void pack_rows(const float* x, int64_t count, int64_t inputs, int height, float* to) {
  for (int64_t k = 0; k < inputs; k += kLanes) {
    int64_t rest = inputs - k;
    // The later rows first: what is stored beyond a tile's height is the next input's first rows, which come after.
    for (int first = (height - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
      Floats v[kLanes] = {};
      for (int i = 0; i < kLanes && first + i < count && first + i < height; ++i) {
        const float* from = x + (first + i) * inputs + k;
        v[i] = rest >= kLanes ? load(from) : load_first(from, rest);
        if (rounds) v[i] = rounded(v[i]);
      }
      transpose(v);
      for (int i = 0; i < kLanes && i < rest; ++i) store(to + (k + i) * height + first, v[i]);
    }
  }
}

// to[k, output] = w[output, k] for `count` outputs of a panel (zeros for the others) and `inputs` of a row's `stride`.
template <typename W>
inline void pack_panel(const W* w, int64_t count, int64_t inputs, int64_t stride, float* to) {
  for (int64_t k = 0; k < inputs; k += kLanes) {
    int64_t rest = inputs - k;
    for (int first = 0; first < kPanel; first += kLanes) {
      Floats v[kLanes] = {};
      const W* from = w + first * stride + k;
      if (first + kLanes <= count && rest >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = load(from + i * stride);
      } else {
        for (int i = 0; i < kLanes && first + i < count; ++i)
          v[i] = rest >= kLanes ? load(from + i * stride) : load_first(from + i * stride, rest);
      }
      transpose(v);
      if (rest >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) store(to + (k + i) * kPanel + first, v[i]);
      } else {
        for (int i = 0; i < rest; ++i) store(to + (k + i) * kPanel + first, v[i]);
      }
    }
  }
}

// What is packed next, fetched into L2 while a tile is multiplied: a line for each input, row by row. Packing reads 32
// rows side by side, which no prefetcher follows.
struct Fetch {
  const char* row;
  int64_t row_bytes;  // From one row to the next.
  int64_t lines;      // Of a row.
};

// sums[row, output] = (begins ? 0 : sums) + x[row] . w[output], x and w packed, for `height` rows and a panel;
// rows of sums are `stride` apart.
template <int height>
inline void multiply_tile(const float* x, const float* w, int64_t inputs, bool begins, float* sums, int64_t stride,
                          Fetch fetch) {
  Floats total[height][2] = {};
  for (int64_t begin = 0; begin < inputs; begin += fetch.lines, fetch.row += fetch.row_bytes) {
    int64_t end = inputs - begin < fetch.lines ? inputs : begin + fetch.lines;
    const char* line = fetch.row;
    for (int64_t k = begin; k < end; ++k, x += height, w += kPanel, line += 64) {
      __builtin_prefetch(line, 0, 2);
      Floats left = load(w), right = load(w + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < height; ++r) {
        Floats value = splat(x[r]);
        total[r][0] = multiply_add(value, left, total[r][0]);
        total[r][1] = multiply_add(value, right, total[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < height; ++r, sums += stride) {
    store(sums, begins ? total[r][0] : total[r][0] + load(sums));
    store(sums + kLanes, begins ? total[r][1] : total[r][1] + load(sums + kLanes));
  }
}

using MultiplyTile = void (*)(const float*, const float*, int64_t, bool, float*, int64_t, Fetch);

template <int height>
MultiplyTile multiply_tile_of(int wanted) {
  if constexpr (height == 1) {
    return multiply_tile<1>;
  } else {
    return wanted == height ? multiply_tile<height> : multiply_tile_of<height - 1>(wanted);
  }
}

}  // namespace prejit
