// Products of few rows of digits (linear_digits.h): as in linear_dot.h, weights are read in place, and lanes are inputs. Sums
// are exact, so no order of rows, outputs or inputs changes a number.
#pragma once

#include "linear_digits.h"
#include "linear_dot.h"

namespace prejit {

constexpr int64_t kDotOutputs = 128;  // Maximum of a block.
// Fewer rows of x read W in place. The sums of low parts of shorts lie behind those of so many rows.
constexpr int64_t kMostDotRows = 65;

template <bool upper>
PREJIT_INLINE Ints unpacked(Ints a, Ints b) {
  Floats x = reinterpret_cast<Floats>(a), y = reinterpret_cast<Floats>(b);
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(upper ? _mm512_unpackhi_ps(x, y) : _mm512_unpacklo_ps(x, y));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(upper ? _mm256_unpackhi_ps(x, y) : _mm256_unpacklo_ps(x, y));
#else
  return reinterpret_cast<Ints>(upper ? _mm_unpackhi_ps(x, y) : _mm_unpacklo_ps(x, y));
#endif
}

template <int order>
PREJIT_INLINE Ints quarters(Ints a, [[maybe_unused]] Ints b) {
  [[maybe_unused]] Floats x = reinterpret_cast<Floats>(a), y = reinterpret_cast<Floats>(b);
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_shuffle_f32x4(x, y, order));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_permute2f128_ps(x, y, order));
#else
  return a;
#endif
}

// Returns the sums of vectors: lane i is that of v[i].
PREJIT_INLINE Ints sum_each(const Ints (&v)[kLanes]) {
  Ints fours[kLanes / 4];
#pragma GCC unroll 4
  for (int i = 0; i < kLanes / 4; ++i) {
    const Ints *of = v + 4 * i, ab = unpacked<false>(of[0], of[1]) + unpacked<true>(of[0], of[1]);
    Ints cd = unpacked<false>(of[2], of[3]) + unpacked<true>(of[2], of[3]);
    fours[i] = shuffled<0x44>(ab, cd) + shuffled<0xEE>(ab, cd);  // in each quarter, of these lanes
  }
#if defined(__AVX512F__)
  Ints low = quarters<0x88>(fours[0], fours[1]) + quarters<0xDD>(fours[0], fours[1]);
  Ints high = quarters<0x88>(fours[2], fours[3]) + quarters<0xDD>(fours[2], fours[3]);
  return quarters<0x88>(low, high) + quarters<0xDD>(low, high);
#elif defined(__AVX2__)
  return quarters<0x20>(fours[0], fours[1]) + quarters<0x31>(fours[0], fours[1]);
#else
  return fours[0];
#endif
}

// Writes the sums of a tile.
template <int rows, int outputs>
PREJIT_INLINE void store_sums(const Ints (&of)[rows][outputs], int64_t spacing, int32_t* sums, int64_t stride) {
#pragma GCC unroll 8
  for (int first = 0; first < rows * outputs; first += kLanes) {
    const int count = rows * outputs - first < kLanes ? rows * outputs - first : kLanes;
    Ints some[kLanes] = {};
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) some[i] = of[(first + i) / outputs][(first + i) % outputs];
    Ints found = sum_each(some);
#pragma GCC unroll 16
    for (int i = 0; i < count; ++i) sums[(first + i) / outputs * stride + (first + i) % outputs * spacing] = found[i];
  }
}

// The last weights of an output, fewer than a vector has, then zeros.
template <typename Vector>
PREJIT_INLINE Vector load_rest(const int8_t* from, int64_t count) {
  int8_t some[sizeof(Vector)] = {};
  memcpy(some, from, count);
  return load_as<Vector>(some);
}

#if defined(PREJIT_HAS_VNNI)
struct ByteDots {
  using X = char;
  using Weight = int8_t;
  using Sum = int32_t;
  static constexpr bool kAreBytes = true;
  static constexpr int kInputs = 4 * kLanes;
  // More rows copy strips of W. Here the lanes of each sum are added in the end, which short rows do often.
  static int64_t most_rows(int64_t inputs) { return kRegisters == 32 && inputs >= 512 ? kMostDotRows - 1 : 24; }
  static constexpr int streams(int rows) {
    if (kRegisters == 32) return 6;
    return rows == 1 ? 6 : rows == 2 ? 4 : 2;
  }

  template <int rows, int outputs, bool fetch>
  static __attribute__((target(PREJIT_VNNI), noinline)) void tile(const char* x, int64_t x_stride, const int8_t* w,
                                                                  int64_t inputs, int64_t spacing,
                                                                  int64_t ahead, int32_t* sums, int64_t stride) {
    Ints total[rows][outputs] = {}, weights[outputs];
    auto add = [&](int64_t k) __attribute__((target(PREJIT_VNNI), always_inline)) {
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        Ints some = in_register(load_as<Ints>(x + r * x_stride + k));
#pragma GCC unroll 8
        for (int o = 0; o < outputs; ++o) total[r][o] = add_dots(total[r][o], weights[o], some);
      }
    };
    int64_t k = 0;
    for (; k + kInputs <= inputs; k += kInputs) {
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) {
        weights[o] = load_as<Ints>(w + o * spacing * inputs + k) ^ kSigns;
        if (fetch) __builtin_prefetch(w + o * spacing * inputs + k + ahead, 0, 2);
      }
      add(k);
    }
    if (k < inputs) {
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) weights[o] = load_rest<Ints>(w + o * spacing * inputs + k, inputs - k) ^ kSigns;
      add(k);
    }
    store_sums<rows, outputs>(total, spacing, sums, stride);
  }

  static constexpr int32_t kSigns = static_cast<int32_t>(0x80808080);
};
#endif

struct ShortDots {
  using X = char;
  using Weight = int8_t;
  using Sum = int32_t;
  static constexpr bool kAreBytes = false;
  static constexpr int kInputs = 2 * kLanes;
  static int64_t most_rows(int64_t) { return 24; }
  static constexpr int streams(int rows) { return FloatDots<int8_t>::streams(rows); }

  using Some = VectorOf<int8_t, kInputs>::type;
  static PREJIT_INLINE Ints widened(Some bytes) {
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepi8_epi16(reinterpret_cast<__m256i>(bytes)));
#elif defined(__AVX2__)
    return reinterpret_cast<Ints>(_mm256_cvtepi8_epi16(reinterpret_cast<__m128i>(bytes)));
#else
    return reinterpret_cast<Ints>(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(reinterpret_cast<int64_t>(bytes))));
#endif
  }

  template <int rows, int outputs, bool fetch>
  static inline void tile(const char* x, int64_t x_stride, const int8_t* w, int64_t inputs, int64_t spacing,
                          int64_t ahead, int32_t* sums, int64_t stride) {
    Ints high[rows][outputs] = {}, low[rows][outputs] = {};
    auto add = [&](int64_t k, auto load_w) __attribute__((always_inline)) {
      Ints xs[rows];
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) xs[r] = load_as<Ints>(x + r * x_stride + 2 * k);
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) {
        Ints weights = widened(load_w(w + o * spacing * inputs + k));
        if (fetch) __builtin_prefetch(w + o * spacing * inputs + k + ahead, 0, 2);
#pragma GCC unroll 4
        for (int r = 0; r < rows; ++r) low[r][o] = in_register(low[r][o] + dots_of_pairs(weights, xs[r]));
      }
    };
    for (int64_t k = 0; k < inputs;) {
      for (int64_t end = least(inputs, k + kShortsAtOnce * kInputs); k + kInputs <= end; k += kInputs)
        add(k, [](const int8_t* from) __attribute__((always_inline)) { return load_as<Some>(from); });
      if (int64_t rest = inputs - k; rest < kInputs && rest > 0) {
        add(k, [rest](const int8_t* from) __attribute__((always_inline)) { return load_rest<Some>(from, rest); });
        k = inputs;
      }
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
        for (int o = 0; o < outputs; ++o) high[r][o] = high[r][o] + (low[r][o] >> kLowBits), low[r][o] = low[r][o] & kLowMask;
    }
    store_sums<rows, outputs>(high, spacing, sums, stride);
    store_sums<rows, outputs>(low, spacing, sums + kMostDotRows * kDotOutputs, stride);
  }
};

}  // namespace prejit
