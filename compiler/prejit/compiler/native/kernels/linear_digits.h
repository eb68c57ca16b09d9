// Rows of x as digits, for products of integers with int8 weights (linear_integers.h).
//
//   encoders   x = s (q + zero), q from -127 to 127, so that what an activation leaves on one side of 0 has all steps. If a
//              few numbers of a row are much larger than the others, which would get few steps, it is multiplied twice: what
//              q leaves is s r / 254
//   decoders   x = s q, q from -32,639 to 32,639: as bytes 256 high + low, each from -128 to 127, else 16 bits
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
// A row whose numbers have a mean size of fewer steps has second digits, in so many parts of a step. One digit has an error
// of at most 1 / (16 sqrt(12)) = 1.8 % then; normally distributed numbers have 30 steps and 0.7 %, as int8 weights have. A root
// mean square would not show that some large channels, beside small weights, leave the others few steps.
constexpr int64_t kFewSteps = 16;
constexpr float kDigit = 254;
// A smaller range of a row is taken for this one, because the number of steps divided by it would not be finite.
constexpr float kLeastRange = 1e-35f;
// The largest fixed-point number whose high digit is at most 127.
constexpr int32_t kMostFixed = 127 * 256 + 127;
// A largest number of a row that is smaller is taken for this one: its inverse and its factor are normal numbers.
constexpr float kLeastFixed = 1e-33f;
// Low digits, of numbers and of their sums.
constexpr int kLowBits = 8;
constexpr int32_t kLowMask = (1 << kLowBits) - 1;
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

// Stores digits of a row for strips, as bytes or as 16 bits.
PREJIT_INLINE void store_digits(Ints q, int64_t k, bool are_bytes, char* to) {
  if (are_bytes) return store_bytes(q, k, to);
  store_shorts(in_order_of_pairs(q), k, to);
}

// A row of digits: y += factor * ((digits + zero) . weights). `begin` is where its sums begin for any output.
struct Digits {
  float factor;
  int32_t begin, zero;
};

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

// Rounds a row to `to`, and returns whether it needs second digits. A row that is not finite gets a factor that is NaN.
inline bool round_row(const float* x, int64_t inputs, bool are_bytes, char* to, Digits& digits, float& inverse) {
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
  float half = largest_x / 2 - least_x / 2;  // The whole range may not be finite.
  bool is_small = half < kLeastRange / 2;
  if (is_small) half = kLeastRange / 2;
  inverse = kSteps / 2 / half;
  int32_t zero = is_finite ? 127 + nearest(splat(least_x * inverse))[0] : 0;
  Ints sum = {}, sizes = {};
  for (int64_t k = 0; k < inputs; k += kLanes) {
    Ints steps = is_finite ? nearest(load_some(x + k, inputs - k) * inverse) : Ints{}, q = steps - zero;
    sum = sum + q, sizes = sizes + (steps < 0 ? -steps : steps);
    store_digits(q, k, are_bytes, to);
  }
  digits = {is_finite ? half / (kSteps / 2) : __builtin_nanf(""), are_bytes ? static_cast<int32_t>(-128 * total(sum)) : 0, zero};
  return is_finite && !is_small && total(sizes) < kFewSteps * inputs;
}

inline void round_rest(const float* x, int64_t inputs, bool are_bytes, char* to, const Digits& of, float inverse, Digits& digits) {
  Ints sum = {};
  for (int64_t k = 0; k < inputs; k += kLanes) {
    Floats v = load_some(x + k, inputs - k) * inverse;
    Ints q = nearest((v - to_floats(nearest(v))) * kDigit);
    sum = sum + q;
    store_digits(q, k, are_bytes, to);
  }
  digits = {of.factor / kDigit, are_bytes ? static_cast<int32_t>(-128 * total(sum)) : 0, 0};
}

// Rounds a row to fixed-point numbers: bytes to `high` and `low`, else 16 bits to `high`. Returns the factor, which is NaN for
// a row that is not finite. `sums` become the sums of the digits.
inline float round_fixed(const float* x, int64_t inputs, bool are_bytes, bool are_in_pairs, char* high, char* low,
                         int32_t (&sums)[2]) {
  Ints size = {};
  for (int64_t k = 0; k < inputs; k += kLanes) size = larger_size(size, load_some(x + k, inputs - k));
  float largest = largest_of(size);
  bool is_finite = largest < __builtin_inff();
  if (largest < kLeastFixed) largest = kLeastFixed;
  float inverse = kMostFixed / largest;
  Ints high_sum = {}, low_sum = {};
  for (int64_t k = 0; k < inputs_of_vectors(inputs); k += kLanes) {
    Ints q = is_finite ? nearest(load_some(x + k, inputs - k) * inverse) : Ints{};
    if (!are_bytes) {
      store_shorts(are_in_pairs ? in_order_of_pairs(q) : q, k, high);
      continue;
    }
    Ints upper = (q + (1 << (kLowBits - 1))) >> kLowBits, rest = q - (upper << kLowBits);
    high_sum = high_sum + upper, low_sum = low_sum + rest;
    store_bytes(upper, k, high), store_bytes(rest, k, low);
  }
  sums[0] = static_cast<int32_t>(total(high_sum)), sums[1] = static_cast<int32_t>(total(low_sum));
  return is_finite ? largest / kMostFixed : __builtin_nanf("");
}

}  // namespace prejit
