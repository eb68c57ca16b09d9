// Vectors of float32 as wide as the level has them, and what attention computes with them.
//
// Vector extensions of GCC and Clang instead of intrinsics: one source for every level and both compilers.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace prejit::attention {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kLanes)));
typedef int32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// Arrays are aligned at their starts only, and rows have any size.
typedef float UnalignedVector __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t UnalignedHalves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

// The bits of a bfloat16: the upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// Every function is inlined: a vector wider than the ABI's never crosses a call.
#define PREJIT_INLINE static inline __attribute__((always_inline))

// x - 0 is x for every x, which the compiler knows; x + 0 is not, for -0.
PREJIT_INLINE Vector splat(float x) { return x - Vector{}; }

PREJIT_INLINE Vector load(const float* from) {
  return *reinterpret_cast<const UnalignedVector*>(from);
}

PREJIT_INLINE Vector load(const BFloat16* from) {
  const Halves halves = *reinterpret_cast<const UnalignedHalves*>(from);
  return (Vector)(__builtin_convertvector(halves, Bits) << 16);
}

PREJIT_INLINE void store(float* to, Vector x) { *reinterpret_cast<UnalignedVector*>(to) = x; }

PREJIT_INLINE float widen(float x) { return x; }

PREJIT_INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

// Of the first `count` elements, zeros behind them; for the end of a row, of which nothing beyond may be read.
template <typename E>
PREJIT_INLINE Vector load_first(const E* from, int64_t count) {
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = widen(from[i]);
  return load(lanes);
}

PREJIT_INLINE void narrow(float x, float* to) { *to = x; }

// Rounded to nearest, ties to even; NaN stays NaN.
PREJIT_INLINE void narrow(float x, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define PREJIT_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PREJIT_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Bits{__VA_ARGS__})  // GCC before 12
#endif
using Lanes = std::make_integer_sequence<int, kLanes>;

// Elements of two vectors in turn, a0 b0 a1 b1 ..., of their first halves (Second = 0) or second (Second = 1).
template <int Second, int... I>
PREJIT_INLINE Vector zip(Vector a, Vector b, std::integer_sequence<int, I...>) {
  return PREJIT_SHUFFLE(a, b, (I / 2 + I % 2 * kLanes + Second * kLanes / 2)...);
}

// Of blocks of Half lanes, those of a and b in turn, each where it is.
template <int Half, int... I>
PREJIT_INLINE Vector blend(Vector a, Vector b, std::integer_sequence<int, I...>) {
  return PREJIT_SHUFFLE(a, b, (I & Half ? I + kLanes : I)...);
}

// The blocks that `blend` leaves out, each where its partner is.
template <int Half, int... I>
PREJIT_INLINE Vector swap(Vector a, Vector b, std::integer_sequence<int, I...>) {
  return PREJIT_SHUFFLE(a, b, (I & Half ? I - Half + kLanes : I + Half)...);
}

// x[i][j] becomes x[j][i].
PREJIT_INLINE void transpose(Vector (&x)[kLanes]) {
  for (int step = 1; step < kLanes; step *= 2) {
    Vector zipped[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      zipped[2 * i] = zip<0>(x[i], x[i + kLanes / 2], Lanes());
      zipped[2 * i + 1] = zip<1>(x[i], x[i + kLanes / 2], Lanes());
    }
    for (int i = 0; i < kLanes; ++i) x[i] = zipped[i];
  }
}

// NaN in a drops out here; the exponential keeps it.
PREJIT_INLINE Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Element i of the result is what the elements of x[i] reduce to, by a tree that halves their number.
template <int Half, typename F>
PREJIT_INLINE Vector reduced(Vector (&x)[kLanes], const F& reduce) {
  for (int i = 0; i < Half; ++i) {
    x[i] = reduce(blend<Half>(x[i], x[i + Half], Lanes()), swap<Half>(x[i], x[i + Half], Lanes()));
  }
  if constexpr (Half == 1) {
    return x[0];
  } else {
    return reduced<Half / 2>(x, reduce);
  }
}

PREJIT_INLINE Vector sums(Vector (&x)[kLanes]) {
  return reduced<kLanes / 2>(x, [](Vector a, Vector b) { return a + b; });
}

PREJIT_INLINE Vector maxima(Vector (&x)[kLanes]) {
  return reduced<kLanes / 2>(x, [](Vector a, Vector b) { return larger(a, b); });
}

template <int Half = kLanes / 2>
PREJIT_INLINE float sum(Vector x) {
  x += swap<Half>(x, x, Lanes());
  if constexpr (Half == 1) {
    return x[0];
  } else {
    return sum<Half / 2>(x);
  }
}

// exp(x) = power * (fraction + 1) with |x - n ln 2| <= ln 2 / 2, power = 2^n, for -87 <= x <= 88. The polynomial is
// the best of its degree in relative error, which is 4e-9: what is left is rounding.
struct Exponential {
  Vector power, fraction;
};

PREJIT_INLINE Exponential exponential(Vector x) {
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number, in the low bits
  const Vector shifted = x * 1.44269504f + shift;
  const Vector n = shifted - shift;
  Vector r = x - n * 0.693359375f;  // ln 2 in two parts, the first of few bits: the product is exact
  r = r + n * 2.12194440e-4f;
  Vector tail = r * 1.3811663e-3f + 8.3701350e-3f;
  tail = tail * r + 4.16685268e-2f;
  tail = tail * r + 1.66665092e-1f;
  tail = tail * r + 4.99999940e-1f;
  const Bits exponent = ((Bits)shifted << 23) + 0x3f800000;
  return {(Vector)exponent, tail * (r * r) + r};
}

// exp(x) for x <= 0, 0 below the smallest normal number, and for minus infinity; NaN of NaN.
PREJIT_INLINE Vector exp_negative(Vector x) {
  const Vector lowest = splat(-87.0f);
  const Exponential e = exponential(x < lowest ? lowest : x);
  const Vector y = e.power * e.fraction + e.power;
  return x < lowest ? Vector{} : y;
}

PREJIT_INLINE float exp_negative(float x) { return exp_negative(splat(x))[0]; }

// tanh(x) by exp(-2 |x|) - 1, which loses nothing near 0; NaN of NaN.
PREJIT_INLINE Vector tanh(Vector x) {
  const Bits sign = (Bits)x & INT32_MIN;
  const Vector magnitude = (Vector)((Bits)x ^ sign);
  const Vector far = splat(-40.0f), doubled = magnitude * -2.0f;
  const Exponential e = exponential(doubled < far ? far : doubled);
  const Vector less_one = e.power * e.fraction + (e.power - 1.0f);
  return (Vector)((Bits)(-less_one / (less_one + 2.0f)) | sign);
}

}  // namespace prejit::attention
