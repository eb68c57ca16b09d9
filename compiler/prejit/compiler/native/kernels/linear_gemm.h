// Products of many rows (after Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).
//
// Lanes are rows: x is packed in panels, transposed, and each weight is broadcast to all rows of a panel. So W, which is
// larger than x for few rows, is not transposed: a strip, some of its outputs, is multiplied in place, or copied next to
// each other as float32. Only the sums are transposed, when they are written.
//
// Each pair of row and output has one accumulator, filled in a fixed order: the result of a row does not depend on the
// other rows.
#pragma once

#include <type_traits>

#include "linear.h"
#include "simd.h"
#include "transpose.h"

namespace prejit {

// Maximum rows of a panel: two vectors.
constexpr int kPanelRows = 2 * kLanes;
// Outputs of a strip: two accumulators for each, with their operands, fill the registers.
constexpr int kStrip = (kRegisters - 4) / 12 * 6;
// Inputs that are summed at once: a strip of them stays in L1, and short float32 sums lose little precision.
constexpr int64_t kInputsAtOnce = 384;
// Elements from one output of a strip to the next: not a power of two, or all would share a few sets of L1.
constexpr int64_t kStripStride = kInputsAtOnce + 16;

// to[k, row] = x[row, k], rounded to bfloat16 if `rounds`, for a panel of `lanes` rows, of which x has `count`; the last
// panel may have fewer.
template <bool rounds>
inline void pack_panel(const float* x, int64_t count, int64_t inputs, int lanes, float* to) {
  for (int64_t k = 0; k < inputs; k += kLanes) {
    int64_t rest = inputs - k;
    for (int first = 0; first < lanes; first += kLanes) {
      Floats v[kLanes] = {};
      const float* from = x + first * inputs + k;
      if (first + kLanes <= count && rest >= kLanes) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = load(from + i * inputs);
      } else {
        for (int i = 0; i < kLanes && first + i < count; ++i)
          v[i] = rest >= kLanes ? load(from + i * inputs) : load_first(from + i * inputs, rest);
      }
      if (rounds)
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = rounded(v[i]);
      if (rest >= kLanes) {
        store_transposed(v, to + k * lanes + first, lanes);
      } else {
        transpose(v);
        for (int i = 0; i < rest; ++i) store(to + (k + i) * lanes + first, v[i]);
      }
    }
  }
}

// to[output, k] = w[output, k] for the `count` outputs of a strip, and zeros for the others.
template <typename W>
inline void copy_strip(const W* w, int64_t count, int64_t inputs, int64_t stride, float* to) {
  for (int64_t o = 0; o < kStrip; ++o, w += stride, to += kStripStride) {
    if (o >= count) {
      for (int64_t k = 0; k < inputs; ++k) to[k] = 0;
      continue;
    }
    int64_t k = 0;
    for (; k + kLanes <= inputs; k += kLanes) store(to + k, load(w + k));
    if (k < inputs) store(to + k, load_first(w + k, inputs - k));
  }
}

// Lines of memory to fetch while a strip is multiplied, one for each input: the first line of each output, then the
// second. Fetching all at once would delay the multiplication.
struct Fetch {
  const char* line;
  int64_t output_bytes;  // Bytes from one output to the next.
  int64_t outputs;
  int64_t lines;  // Number of lines in total.
};

// sums[output, row] = (begins ? 0 : sums) + x[row] . w[output] for a panel of `vectors` and a strip whose outputs are
// `stride` apart.
template <int vectors>
inline void multiply_strip(const float* x, const float* w, int64_t stride, int64_t inputs, bool begins, float* sums,
                           Fetch fetch) {
  static_assert(kStrip % 3 == 0);
  Floats total[kStrip][vectors] = {};
  const float* some[kStrip / 3];  // Three outputs can be addressed from one of them.
  for (int s = 0; s < kStrip / 3; ++s) some[s] = w + s * 3 * stride;
  const char* end = fetch.line + fetch.outputs * fetch.output_bytes;
  auto multiply = [&](int64_t count, auto fetches) __attribute__((always_inline)) {
    for (int64_t k = 0; k < count; ++k, x += vectors * kLanes) {
      if (fetches.value) {
        __builtin_prefetch(fetch.line, 0, 2);
        fetch.line += fetch.output_bytes;
        bool wraps = fetch.line == end;
        fetch.line -= wraps ? fetch.outputs * fetch.output_bytes - 64 : 0;
        end += wraps ? 64 : 0;
      }
      Floats xs[vectors];
#pragma GCC unroll 2
      for (int v = 0; v < vectors; ++v) xs[v] = load(x + v * kLanes);
#pragma GCC unroll 16
      for (int o = 0; o < kStrip; ++o) {
        Floats weight = splat(some[o / 3][o % 3 * stride]);
#pragma GCC unroll 2
        for (int v = 0; v < vectors; ++v) total[o][v] = multiply_add(xs[v], weight, total[o][v]);
      }
#pragma GCC unroll 16
      for (int s = 0; s < kStrip / 3; ++s) ++some[s];
    }
  };
  int64_t fetching = fetch.lines < inputs ? fetch.lines : inputs;
  multiply(fetching, std::true_type{});
  multiply(inputs - fetching, std::false_type{});
#pragma GCC unroll 16
  for (int o = 0; o < kStrip; ++o) {
#pragma GCC unroll 2
    for (int v = 0; v < vectors; ++v, sums += kLanes)
      store(sums, begins ? total[o][v] : total[o][v] + load(sums));
  }
}

// to[row, output] = sums[output, row] for a panel of `lanes` rows and whole vectors of outputs.
inline void unpack_sums(const float* sums, int lanes, int64_t outputs, float* to, int64_t stride) {
  for (int64_t o = 0; o < outputs; o += kLanes)
    for (int first = 0; first < lanes; first += kLanes) {
      Floats v[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) v[i] = load(sums + (o + i) * lanes + first);
      store_transposed(v, to + first * stride + o, stride);
    }
}

}  // namespace prejit
