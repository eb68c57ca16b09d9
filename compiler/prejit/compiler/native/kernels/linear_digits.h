// Rows of x as digits, for products of integers with int8 weights (linear_integers.h):
//
//   x = s (q + zero + r / 256)     q from -127 to 127, r from -128 to 127
//
// Most rows have one digit, q. If a few numbers are much larger than the others, which would get few steps, a row has a second
// one, r. A zero lets what an activation leaves on one side of 0 have all steps. In 16 bits a row has both digits and no zero.
// Where no instruction multiplies bytes, 256 q + r is one number.
#pragma once

#include "linear_integers.h"
#include "linear_multiplier.h"
#include "simd.h"
#include "threads.h"

namespace prejit {

#if defined(PREJIT_HAS_VNNI)
#if defined(__AVX512F__)
#define PREJIT_VNNI "avx512vnni"
using Bytes = __m512i;
#define PREJIT_ADD_DOTS _mm512_dpbusd_epi32
#else
#define PREJIT_VNNI "avxvnni"
using Bytes = __m256i;
#define PREJIT_ADD_DOTS _mm256_dpbusd_avx_epi32
#endif
inline __attribute__((target(PREJIT_VNNI), always_inline)) Ints add_dots(Ints to, Ints w, Ints x) {
  return reinterpret_cast<Ints>(
      PREJIT_ADD_DOTS(reinterpret_cast<Bytes>(to), reinterpret_cast<Bytes>(w), reinterpret_cast<Bytes>(x)));
}
#endif

// The range of a row has so many steps. 0 lies on one; rounding the range's ends may take one more.
constexpr float kSteps = 253;
// A row whose numbers have a mean size of fewer steps has second digits. One digit has an error of at most
// 1 / (16 sqrt(12)) = 1.8 % then; normally distributed numbers have 30 steps and 0.8 %, as int8 weights have. A root
// mean square would not show that some large channels, beside small weights, leave the others few steps.
constexpr int64_t kFewSteps = 16;
// A smaller range of a row is taken for this one: its inverse and its factor are normal numbers.
constexpr float kLeastRange = 1e-33f;
// Second digits, of numbers and of their sums.
constexpr int kLowBits = 8;
constexpr int32_t kLowParts = 1 << kLowBits, kLowMask = kLowParts - 1;
constexpr int32_t kMostFixed = 127 * kLowParts + 127;
// Pairs of products with 16 bits whose sum fits 32 bits.
constexpr int64_t kShortsAtOnce = 256;
// With the rest of a row, and what an earlier carry left.
static_assert((kShortsAtOnce + 1) * 2 * 128 * int64_t{kMostFixed} + kLowMask < int64_t{1} << 31);

PREJIT_INLINE Ints nearest(Floats v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(v));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(v));
#else
  return reinterpret_cast<Ints>(_mm_cvtps_epi32(v));
#endif
}
PREJIT_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Multiplies pairs of 16 bits and adds the two products of a lane.
PREJIT_INLINE Ints dots_of_pairs(Ints a, Ints b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#endif
}

// The bytes of weights as they are, in 16 bits each.
struct Pairs {
  Ints even, odd;
};
PREJIT_INLINE Pairs pairs_of(Ints bytes) {
  using Halves = VectorOf<int16_t, 2 * kLanes>::type;
  Halves w = reinterpret_cast<Halves>(bytes);
  return {reinterpret_cast<Ints>(w << 8 >> 8), reinterpret_cast<Ints>(w >> 8)};
}

PREJIT_INLINE Ints sums_of_pairs(Pairs pairs) {
  return dots_of_pairs(pairs.even, Ints{} + 0x10001) + dots_of_pairs(pairs.odd, Ints{} + 0x10001);
}

// In each four lanes: two of a, then two of b, as the instruction's `order` says.
template <int order>
PREJIT_INLINE Ints shuffled(Ints a, Ints b) {
  Floats x = reinterpret_cast<Floats>(a), y = reinterpret_cast<Floats>(b);
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_shuffle_ps(x, y, order));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_shuffle_ps(x, y, order));
#else
  return reinterpret_cast<Ints>(_mm_shuffle_ps(x, y, order));
#endif
}

// In each four: 0 2 1 3, as weights are widened.
PREJIT_INLINE Ints in_order_of_pairs(Ints v) { return shuffled<_MM_SHUFFLE(3, 1, 2, 0)>(v, v); }

// Inputs of whole vectors of bytes, to which rows of fixed-point numbers are filled with zeros.
inline int64_t inputs_of_vectors(int64_t inputs) { return parts_of(inputs, 4 * kLanes) * (4 * kLanes); }

using Shorts = VectorOf<int16_t, kLanes>::type;

PREJIT_INLINE void store_shorts(Ints q, int64_t k, char* to) {
  Shorts shorts = __builtin_convertvector(q, Shorts);
  memcpy(to + 2 * k, &shorts, sizeof shorts);
}

// Only CPUs with VNNI multiply bytes.
PREJIT_INLINE void store_bytes([[maybe_unused]] Ints q, [[maybe_unused]] int64_t k, [[maybe_unused]] char* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(q)));
#elif defined(__AVX2__)
  __m128i shorts = reinterpret_cast<__m128i>(__builtin_convertvector(q, Shorts));
  _mm_storeu_si64(to + k, _mm_packs_epi16(shorts, shorts));
#endif
}

// The sum of products with fixed-point numbers, 256 high + low, as a float. `low` may be any number: the same sum gives the
// same float, however it was added up.
PREJIT_INLINE Floats fixed_sum(Ints high, Ints low, Floats factor) {
  high = high + (low >> kLowBits), low = low & kLowMask;
  return (to_floats(high) * (1 << kLowBits) + to_floats(low)) * factor;  // the first product is exact
}

PREJIT_INLINE int64_t total(Ints v) {
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// Keeps the bits of the larger size of each lane. They are in the order of sizes, and above all of them infinity and NaN.
PREJIT_INLINE Ints larger_size(Ints size, Floats v) {
  Ints bits = reinterpret_cast<Ints>(v) & 0x7FFFFFFF;
  return bits > size ? bits : size;
}
PREJIT_INLINE float largest_of(Ints sizes) {
  int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = sizes[i] > most ? sizes[i] : most;
  float largest;
  memcpy(&largest, &most, sizeof largest);
  return largest;
}

// How digits are stored.
enum class Store {
  kBytes,
  kShorts,
  kPairs,  // Shorts in the order of pairs.
};

// A row as digits: y = factor * (256 (q + zero) + r) . w
struct Digits {
  float factor;  // NaN for a row that is not finite.
  int32_t zero;
  int32_t sums[2];  // Of q and of r, if they are bytes.
  bool has_second;
};

// Rounds a row. `first` gets q and `second` r, if the row has it; shorts are in `first`. Rows end with zeros, up to whole
// vectors of bytes.
inline Digits round_row(const float* x, int64_t inputs, bool is_wide, Store how, char* first, char* second) {
  Floats low = {}, high = {};
  Ints size = {};
  for (int64_t k = 0; k < inputs; k += kLanes) {
    Floats v = load_some(x + k, inputs - k);
    size = larger_size(size, v);
    low = v < low ? v : low, high = v > high ? v : high;
  }
  float least_x = 0, largest_x = 0;
  for (int i = 0; i < kLanes; ++i)
    least_x = low[i] < least_x ? low[i] : least_x, largest_x = high[i] > largest_x ? high[i] : largest_x;
  bool is_finite = largest_of(size) < __builtin_inff();
  float half = largest_x / 2 - least_x / 2, middle = largest_x / 2 + least_x / 2;  // The whole may not be finite.
  // A zero takes another sum, that of the weights. Sides nearly alike do without: they lose a seventeenth of the steps.
  bool is_even = is_wide || (middle < 0 ? -middle : middle) <= half / 16;
  if (is_even) half = largest_of(size);
  if (!is_finite || half < kLeastRange / 2) half = kLeastRange / 2;
  float inverse = kSteps / 2 / half;
  int32_t zero = is_even || !is_finite ? 0 : 127 + nearest(splat(least_x * inverse))[0];
  auto fixed = [&](int64_t k) __attribute__((always_inline)) {
    return is_finite ? nearest(load_some(x + k, inputs - k) * inverse * float{kLowParts}) : Ints{};
  };
  auto upper = [](Ints v) __attribute__((always_inline)) { return (v + kLowParts / 2) >> kLowBits; };
  bool has_second = is_wide;
  if (!is_wide) {
    Ints sizes = {};
    for (int64_t k = 0; k < inputs; k += kLanes) {
      Ints q = upper(fixed(k));
      sizes = sizes + (q < 0 ? -q : q);
    }
    int64_t all = total(sizes);
    has_second = all > 0 && all < kFewSteps * inputs;
  }
  Ints sum = {}, second_sum = {};
  for (int64_t k = 0; k < inputs_of_vectors(inputs); k += kLanes) {
    Ints v = fixed(k), q = upper(v), r = v - (q << kLowBits);
    if (k + kLanes > inputs) {
      int32_t count = static_cast<int32_t>(inputs - k);
      for (int i = 0; i < kLanes; ++i) q[i] = i < count ? q[i] - zero : 0;
    } else {
      q = q - zero;
    }
    if (!has_second) r = Ints{};
    if (how != Store::kBytes) {
      v = (q << kLowBits) + r;
      store_shorts(how == Store::kPairs ? in_order_of_pairs(v) : v, k, first);
      continue;
    }
    sum = sum + q, second_sum = second_sum + r;
    store_bytes(q, k, first);
    if (has_second) store_bytes(r, k, second);
  }
  return {is_finite ? half / (kSteps / 2) / kLowParts : __builtin_nanf(""), zero,
          {static_cast<int32_t>(total(sum)), static_cast<int32_t>(total(second_sum))}, has_second};
}

}  // namespace prejit
