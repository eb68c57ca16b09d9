// Products of few rows: each weight is read once, in place, and multiplied with all rows.
//
// Each pair of row and output has one accumulator, filled and summed in a fixed order: the result of a row does not
// depend on the other rows, as long as they are few. The same holds among many rows (linear_amx.h, linear_gemm.h).
// Between few and many rows the order of the sums differs, and so do the last bits.
#pragma once

#include <type_traits>

#include "linear.h"
#include "simd.h"

namespace prejit {

// Bytes of a stream. The prefetcher needs streams of many pages: 8 streams of 2 KB read 25 GB/s, of 4 KB 38, of 16 KB
// 42; with 128 KB one row reads 3 to 10 % more than with 16 (Zen 4).
constexpr int64_t kStreamBytes = 131072;

// How far ahead weights are fetched for several rows: the arithmetic of a few vectors fills the reorder buffer, so loads
// alone do not look far enough ahead. Each pass over the same weights fetches, or memory is idle in the later ones; these
// fetch at least the next output, as this one is there.
constexpr int64_t kFetchBytes = 2048;

constexpr int kRowsAtOnce = 4;

// How a tile is multiplied: some rows of x and some outputs. Others are in linear_digit_dots.h. Each has
//
//   X, Weight   the elements of x as it is packed, and of weights
//   Sum         float, or int32_t for digits
//   kInputs     the inputs of a vector
//   streams     the number of rows of weights that are read side by side
//   tile        sums[row, output * spacing] = x[row] . w[output * spacing]
template <typename W>
struct FloatDots {
  using X = float;
  using Weight = W;
  using Sum = float;
  static constexpr int kInputs = kLanes;

  // One stream has too few loads in flight: 8 streams read 39 GB/s where one reads 31 (Zen 4, two cores); 6 read 2 to 5 %
  // more than 8, and 4 rows have registers for 6. Several rows need 12 sums, or FMAs wait for each other: 4 rows
  // reach 77 of 104 GFLOP/s, with 8 sums 62 (Zen 3, one core).
  static constexpr int streams(int rows) {
    if (kRegisters == 32) return 6;
    return rows == 1 ? 8 : 12 / rows;
  }

  template <int rows, int outputs, bool fetch>
  static inline void tile(const float* x, int64_t x_stride, const W* w, int64_t inputs, int64_t spacing, int64_t ahead,
                          float* sums, int64_t stride) {
    Floats total[rows][outputs] = {};
    int64_t k = 0;
    auto add = [&](auto load_x, auto load_w) __attribute__((always_inline)) {
      // The fewer operands stay in registers beside the sums, and the others pass through one.
      if constexpr (kRegisters < 32 && outputs < rows) {
        Floats ws[outputs];
#pragma GCC unroll 16
        for (int o = 0; o < outputs; ++o) {
          ws[o] = load_w(w + o * spacing * inputs + k);
          if (fetch) __builtin_prefetch(w + o * spacing * inputs + k + ahead, 0, 2);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
          Floats some = load_x(x + r * x_stride + k);
#pragma GCC unroll 16
          for (int o = 0; o < outputs; ++o) total[r][o] = multiply_add(some, ws[o], total[r][o]);
        }
        return;
      }
      Floats xs[rows];
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) xs[r] = load_x(x + r * x_stride + k);
#pragma GCC unroll 16
      for (int o = 0; o < outputs; ++o) {
        Floats weight = load_w(w + o * spacing * inputs + k);
        if (fetch) __builtin_prefetch(w + o * spacing * inputs + k + ahead, 0, 2);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) total[r][o] = multiply_add(xs[r], weight, total[r][o]);
      }
    };
    for (; k + kLanes <= inputs; k += kLanes)
      add([](const float* from) __attribute__((always_inline)) { return load(from); },
          [](const W* from) __attribute__((always_inline)) { return load(from); });
    if (int64_t rest = inputs - k)
      add([rest](const float* from) __attribute__((always_inline)) { return load_first(from, rest); },
          [rest](const W* from) __attribute__((always_inline)) { return load_first(from, rest); });
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 16
      for (int o = 0; o < outputs; ++o) sums[r * stride + o * spacing] = sum(total[r][o]);
  }
};

// Does the same for `streams` outputs, all in one tile, or one after the other.
template <typename Dots, int rows>
inline void dot_streams(const typename Dots::X* x, int64_t x_stride, const typename Dots::Weight* w, int64_t inputs,
                        int64_t spacing, int64_t streams, int64_t ahead, typename Dots::Sum* sums, int64_t stride) {
  constexpr int kMost = Dots::streams(rows), kMany = Dots::streams(kRowsAtOnce);
  auto run = [&](auto count, auto fetch) {
    Dots::template tile<rows, count.value, fetch.value>(x, x_stride, w, inputs, spacing, ahead, sums, stride);
  };
  using Fetch = std::bool_constant<true>;
  using Not = std::bool_constant<false>;
  if (streams == kMost && ahead) return run(std::integral_constant<int, kMost>{}, Fetch{});
  if (streams == kMost) return run(std::integral_constant<int, kMost>{}, Not{});
  if (streams == kMany && ahead) return run(std::integral_constant<int, kMany>{}, Fetch{});
  if (streams == kMany) return run(std::integral_constant<int, kMany>{}, Not{});
  for (; streams > 0; --streams, w += spacing * inputs, sums += spacing)
    Dots::template tile<rows, 1, false>(x, x_stride, w, inputs, spacing, ahead, sums, stride);
}

// Does the same for any number of rows.
template <typename Dots>
inline void dot_rows(const typename Dots::X* x, int64_t rows, int64_t x_stride, const typename Dots::Weight* w,
                     int64_t inputs, int64_t spacing, int64_t streams, typename Dots::Sum* sums, int64_t stride) {
  int64_t passes = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  for (int64_t pass = 0; pass < passes; ++pass) {
    int64_t ahead = rows > 2 ? kFetchBytes / sizeof(*w) : 0;
    if (pass > 0 && inputs > ahead) ahead = inputs;
    auto run = [&](auto count) {
      dot_streams<Dots, count.value>(x, x_stride, w, inputs, spacing, streams, ahead, sums, stride);
    };
    switch (rows - pass * kRowsAtOnce) {
      case 1: run(std::integral_constant<int, 1>{}); break;
      case 2: run(std::integral_constant<int, 2>{}); break;
      case 3: run(std::integral_constant<int, 3>{}); break;
      default: run(std::integral_constant<int, kRowsAtOnce>{}); break;
    }
    x += kRowsAtOnce * x_stride;
    sums += kRowsAtOnce * stride;
  }
}

// Returns how many streams a product of `rows` rows reads.
template <typename Dots>
inline int64_t dot_streams_of(int64_t rows) {
  switch (rows) {
    case 1: return Dots::streams(1);
    case 2: return Dots::streams(2);
    case 3: return Dots::streams(3);
    default: return Dots::streams(kRowsAtOnce);
  }
}

// sums[row, output] = x[row] . w[output] for `count` consecutive outputs; a stream is one part of them.
template <typename Dots>
inline void dot_block(const typename Dots::X* x, int64_t rows, int64_t x_stride, const typename Dots::Weight* w,
                      int64_t inputs, int64_t count, typename Dots::Sum* sums, int64_t stride) {
  int64_t streams = dot_streams_of<Dots>(rows);
  int64_t spacing = count / streams;
  for (int64_t j = 0; j < spacing; ++j)
    dot_rows<Dots>(x, rows, x_stride, w + j * inputs, inputs, spacing, streams, sums + j, stride);
  int64_t done = spacing * streams;
  if (done < count)
    dot_rows<Dots>(x, rows, x_stride, w + done * inputs, inputs, 1, count - done, sums + done, stride);
}

// Returns the outputs of a block: streams of kStreamBytes, or less if the threads would not have a few blocks each.
inline int64_t dot_block_outputs(int64_t streams, int64_t output_bytes, int64_t outputs, int threads, int64_t most) {
  int64_t spacing = (kStreamBytes + output_bytes) / (output_bytes + 1);
  int64_t fair = outputs / (8 * threads * streams);
  if (spacing > fair) spacing = fair;
  if (spacing > most / streams) spacing = most / streams;
  return (spacing < 1 ? 1 : spacing) * streams;
}

}  // namespace prejit
