// Activations of vectors, accurate to float32's rounding. NaN stays NaN.
#pragma once

#include "simd.h"

namespace prejit {

enum class Activation : int32_t { kNone = 0, kGeluErf = 1, kGeluTanh = 2, kRelu = 3, kSilu = 4 };

// Returns v where it is in [low, high], else the nearer end.
PREJIT_INLINE Floats within(Floats v, float low, float high) { return minimum(splat(high), maximum(splat(low), v)); }

// Returns e^v for v in [-87, 88], where e^v neither vanishes nor overflows, or NaN; relative error below 2e-7.
PREJIT_INLINE Floats exponential_within(Floats v) {
  // v = n ln 2 + r, |r| <= ln 2 / 2; adding 1.5 * 2^23 rounds to the nearest integer.
  Floats shifted = v * 1.44269504f + 12582912.0f;
  Floats n = shifted - 12582912.0f;
  Floats r = v - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  // Taylor's series: the first omitted term is r^8 / 8! < 6e-9.
  Floats p = r * (1.0f / 5040) + (1.0f / 720);
  p = p * r + (1.0f / 120);
  p = p * r + (1.0f / 24);
  p = p * r + (1.0f / 6);
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Ints exponent = (reinterpret_cast<Ints>(shifted) - 0x4B400000 + 127) << 23;
  return p * reinterpret_cast<Floats>(exponent);
}

PREJIT_INLINE Floats exponential(Floats v) { return exponential_within(within(v, -87.0f, 88.0f)); }

// v / (1 + e^-w).
PREJIT_INLINE Floats times_sigmoid(Floats v, Floats w) { return v / (exponential(-w) + 1.0f); }

PREJIT_INLINE Floats silu(Floats v) { return times_sigmoid(v, v); }

// v (1 + tanh(u)) / 2 = v / (1 + e^-2u), u = sqrt(2 / pi) (v + 0.044715 v^3).
PREJIT_INLINE Floats gelu_tanh(Floats v) {
  return times_sigmoid(v, v * 1.59576912f + v * v * v * 0.0713548163f);
}

// v Phi(v) = v / (1 + e^-logit(Phi(v))). logit(Phi(v)) / v is a smooth function of v^2; the polynomial is fitted to it on
// [0, 6] such that the greatest error of v Phi(v) is least (1e-8; with float32's rounding 4e-7 of the value).
PREJIT_INLINE Floats gelu_erf(Floats v) {
  constexpr float kCoefficients[] = {2.8588256436624937e-13f, -2.8759213760443103e-11f, 1.1002931898929091e-09f,
                                     -1.7253295681030067e-08f, -5.476140430005216e-08f, 6.7806654442392755e-06f,
                                     -0.000107325438875705f,   -6.964059866731986e-05f, 0.07266846299171448f,
                                     1.5957696437835693f};
  Floats clamped = within(v, -6.0f, 6.0f);
  Floats square = clamped * clamped;
  Floats p = splat(kCoefficients[0]);
#pragma GCC unroll 16
  for (int i = 1; i < 10; ++i) p = p * square + kCoefficients[i];
  // Below -6 the value is almost 0 and is kept constant.
  return maximum(splat(-6.0f), v) / (exponential_within(-(clamped * p)) + 1.0f);
}

PREJIT_INLINE Floats apply(Activation activation, Floats v) {
  switch (activation) {
    case Activation::kGeluErf: return gelu_erf(v);
    case Activation::kGeluTanh: return gelu_tanh(v);
    case Activation::kRelu: return maximum(splat(0.0f), v);
    case Activation::kSilu: return silu(v);
    case Activation::kNone: break;
  }
  return v;
}

}  // namespace prejit
