// Finishes the sums of a product while they are in L1: scale, bias, activation, gate, residual.
#pragma once

#include "linear.h"

namespace prejit {

// What follows the sums of some outputs of a row; arrays begin at the first of them, and those that are not there are null.
struct Finished {
  const float *sums, *scale, *bias;
  const float *up_sums, *up_scale, *up_bias;
  const float* residual;
  float* y;
};

// Products are rounded before anything is added to them, with every activation: fused, they would have other bits than a row
// whose activation another kernel applies.
template <typename Load>
PREJIT_INLINE Floats scaled(const float* sums, const float* scale, const float* bias, int64_t i, Load load_some) {
  Floats v = load_some(sums + i);
  if (scale) v = in_register(v * load_some(scale + i));
  if (bias) v = v + load_some(bias + i);
  return v;
}

template <Activation activation, typename Load, typename Store>
PREJIT_INLINE void finish_vector(const Finished& f, int64_t i, Load load_some, Store store_some) {
  Floats v = apply(activation, scaled(f.sums, f.scale, f.bias, i, load_some));
  if (f.up_sums) v = in_register(v * scaled(f.up_sums, f.up_scale, f.up_bias, i, load_some));
  if (f.residual) v = v + load_some(f.residual + i);
  store_some(f.y + i, v);
}

// A copy of what follows, which no store can change: the compiler keeps it in registers.
template <Activation activation>
inline void finish_row(const Finished f, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    finish_vector<activation>(f, i, [](const float* from) { return load(from); }, [](float* to, Floats v) { store(to, v); });
  if (int64_t rest = count - i)
    finish_vector<activation>(f, i, [rest](const float* from) { return load_first(from, rest); },
                              [rest](float* to, Floats v) { store_first(to, v, rest); });
}

// Writes y[row, first .. first + count) from the sums of x W^T (and of x U^T if gated).
inline void finish(const Linear& p, const float* sums, const float* up_sums, int64_t row, int64_t first, int64_t count) {
  auto from = [first](const float* array) { return array ? array + first : nullptr; };
  int64_t at = row * p.outputs + first;
  Finished f = {sums, from(p.weights.scale), from(p.weights.bias), p.gated ? up_sums : nullptr, from(p.up.scale),
                from(p.up.bias), p.residual ? p.residual + at : nullptr, p.y + at};
  switch (p.activation) {
    case Activation::kGeluErf: return finish_row<Activation::kGeluErf>(f, count);
    case Activation::kGeluTanh: return finish_row<Activation::kGeluTanh>(f, count);
    case Activation::kRelu: return finish_row<Activation::kRelu>(f, count);
    case Activation::kSilu: return finish_row<Activation::kSilu>(f, count);
    case Activation::kNone: return finish_row<Activation::kNone>(f, count);
  }
}

}  // namespace prejit
