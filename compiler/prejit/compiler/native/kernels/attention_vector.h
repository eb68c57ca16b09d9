// Vector functions that only attention uses: rounding to the cache's dtype, reductions of several vectors at once, exp
// and tanh.
//
// Its exponential differs from that of activation.h: it keeps e^x - 1 as a part, which tanh needs near 0, and its
// arguments need no upper bound. Neither can serve for both without changing the last bits of results or the speed.
#pragma once

#include <cstring>
#include <utility>

#include "simd.h"
#include "transpose.h"

namespace prejit::attention {

constexpr int64_t kChunk = 64;  // keys whose scores fit the first-level cache

PREJIT_INLINE void narrow(float x, float* to) { *to = x; }

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN.
PREJIT_INLINE void narrow(float x, Bf16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

// A cache of int8 keeps a vector as H integers and, behind them, the float32 by which they are multiplied.
template <typename E>
constexpr int64_t kTail = sizeof(E) == 1 ? sizeof(float) : 0;

// Returns the factor of a row: what `load` gives is multiplied by it.
template <typename E>
PREJIT_INLINE float factor_of(const E*, int64_t) {
  return 1;
}
PREJIT_INLINE float factor_of(const int8_t* row, int64_t size) {
  float factor;
  std::memcpy(&factor, row + size, sizeof factor);
  return factor;
}

// Returns some elements of a row as float32.
template <typename E>
PREJIT_INLINE Floats widened(const E* row, int64_t h, int64_t size, float factor, bool rounds) {
  const Floats some = (h + kLanes <= size ? load(row + h) : load_first(row + h, size - h)) * factor;
  return sizeof(E) == sizeof(float) && rounds ? rounded(some) : some;
}

// Rows of a cache that are summed next: `count` from `first` on, each `stride` elements behind the one before, and so
// many rows behind them.
template <typename E>
struct Rows {
  const E* first;
  int64_t stride;
  int64_t count;
  int64_t behind;

  // Fetches the row that has row s's place in the next chunk, into the second-level cache: the chunk at hand fills the
  // first. Between the copies of two chunks lies arithmetic, so the processor's own prefetching begins anew with each:
  // 2,000 positions of 8 heads of bfloat16 take 340 us without this, 345 with the first level, 250 so (Zen 4).
  PREJIT_INLINE void fetch_behind(int64_t s, int64_t size) const {
    const E* row = first + (s + kChunk) * stride;
    for (int64_t h = 0; s < behind && h < size + kTail<E>; h += 64 / sizeof(E)) __builtin_prefetch(row + h, 0, 2);
  }
};

// Writes a row of a cache.
template <typename E>
void write_row(const float* from, int64_t size, E* to) {
  for (int64_t h = 0; h < size; ++h) narrow(from[h], to + h);
}

// Rounds to the nearest of 255 values, ties to even, and gives the bits that models/layers/attention.py gives. A row
// with an element that is no finite number becomes NaN; one whose elements are all below 2^-100, zeros.
inline void write_row(const float* from, int64_t size, int8_t* to) {
  float most = 0;
  bool finite = true;
  for (int64_t h = 0; h < size; ++h) {
    const float magnitude = __builtin_fabsf(from[h]);
    finite &= magnitude < __builtin_inff();
    most = magnitude > most ? magnitude : most;
  }
  const bool some = finite && most >= 0x1p-100f;
  float factor = some ? most * (1 / 127.0f) : finite ? 0 : __builtin_nanf("");
  const float inverse = some ? 1 / factor : 0;
  for (int64_t h = 0; h < size; ++h) to[h] = some ? static_cast<int8_t>(__builtin_rintf(from[h] * inverse)) : 0;
  std::memcpy(to + size, &factor, sizeof factor);
}

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define PREJIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PREJIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})  // GCC before 12
#endif
using Lanes = std::make_integer_sequence<int, kLanes>;

// Takes blocks of Half lanes from a and b in turn; each block stays at its place.
template <int Half, int... I>
PREJIT_INLINE Floats blend(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return PREJIT_SHUFFLE(a, b, (I & Half ? I + kLanes : I)...);
}

// Takes the blocks that `blend` leaves out; each block moves to the place of its partner.
template <int Half, int... I>
PREJIT_INLINE Floats swap(Floats a, Floats b, std::integer_sequence<int, I...>) {
  return PREJIT_SHUFFLE(a, b, (I & Half ? I - Half + kLanes : I + Half)...);
}

// Reduces the elements of each x[i] to element i of the result, by a tree that halves their number.
template <int Half, typename F>
PREJIT_INLINE Floats reduced(Floats (&x)[kLanes], const F& reduce) {
  for (int i = 0; i < Half; ++i) {
    x[i] = reduce(blend<Half>(x[i], x[i + Half], Lanes()), swap<Half>(x[i], x[i + Half], Lanes()));
  }
  if constexpr (Half == 1) {
    return x[0];
  } else {
    return reduced<Half / 2>(x, reduce);
  }
}

// NaN may be lost here; the exponential keeps the NaN of a score.
PREJIT_INLINE Floats maxima(Floats (&x)[kLanes]) {
  return reduced<kLanes / 2>(x, [](Floats a, Floats b) { return maximum(a, b); });
}

// exp(x) = power * (fraction + 1) with |x - n ln 2| <= ln 2 / 2, power = 2^n, for -87 <= x <= 88. The polynomial has the
// least relative error of its degree, 4e-9, which is below float32's rounding.
struct Exponential {
  Floats power, fraction;
};

PREJIT_INLINE Exponential exponential(Floats x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits
  const Floats shifted = x * 1.44269504f + shift;
  const Floats n = shifted - shift;
  Floats r = x - n * 0.693359375f;  // ln 2 in two parts, the first with few bits so that the product is exact
  r = r + n * 2.12194440e-4f;
  Floats tail = r * 1.3811663e-3f + 8.3701350e-3f;
  tail = tail * r + 4.16685268e-2f;
  tail = tail * r + 1.66665092e-1f;
  tail = tail * r + 4.99999940e-1f;
  const Ints exponent = ((Ints)shifted << 23) + 0x3f800000;
  return {(Floats)exponent, tail * (r * r) + r};
}

// Returns exp(x) for x <= 0: 0 for minus infinity and for results below the smallest normal number, NaN for NaN.
PREJIT_INLINE Floats exp_negative(Floats x) {
  const Floats lowest = splat(-87.0f);
  const Exponential e = exponential(x < lowest ? lowest : x);
  const Floats y = e.power * e.fraction + e.power;
  return x < lowest ? Floats{} : y;
}

// Returns 2^n for a whole number n <= 0: 0 below the smallest normal number.
PREJIT_INLINE Floats power_of_two(Floats n) {
  const Floats lowest = splat(-127.0f);
  const Ints low_bits = (Ints)((n < lowest ? lowest : n) + 12582912.0f);
  return (Floats)((low_bits << 23) + 0x3f800000);
}

// Returns the least whole number that is not below x.
PREJIT_INLINE Floats ceiling(Floats x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_ceil_ps(x);
#else
  return _mm_ceil_ps(x);
#endif
}

// Returns tanh(x) by exp(-2 |x|) - 1, which is accurate near 0; NaN for NaN.
PREJIT_INLINE Floats tanh(Floats x) {
  const Ints sign = (Ints)x & INT32_MIN;
  const Floats magnitude = (Floats)((Ints)x ^ sign);
  const Floats far = splat(-40.0f), doubled = magnitude * -2.0f;
  const Exponential e = exponential(doubled < far ? far : doubled);
  const Floats less_one = e.power * e.fraction + (e.power - 1.0f);
  return (Floats)((Ints)(-less_one / (less_one + 2.0f)) | sign);
}

}  // namespace prejit::attention
