// Finishes the sums of a product while they are in L1: scale, bias, activation, gate, residual.
#pragma once

#include "linear.h"

namespace prejit {

template <typename Load>
PREJIT_INLINE Floats scaled(const Weights& weights, Floats sums, int64_t output, Load load_some) {
  if (weights.scale) sums = sums * load_some(weights.scale + output);
  if (weights.bias) sums = sums + load_some(weights.bias + output);
  return sums;
}

template <typename Load, typename Store>
PREJIT_INLINE void finish_vector(const Linear& p, const float* sums, const float* up_sums, int64_t row, int64_t output,
                                 Load load_some, Store store_some) {
  Floats v = apply(p.activation, scaled(p.weights, load_some(sums), output, load_some));
  if (p.gated) v = v * scaled(p.up, load_some(up_sums), output, load_some);
  int64_t at = row * p.outputs + output;
  if (p.residual) v = v + load_some(p.residual + at);
  store_some(p.y + at, v);
}

// Writes y[row, first .. first + count) from the sums of x W^T (and of x U^T if gated).
inline void finish(const Linear& p, const float* sums, const float* up_sums, int64_t row, int64_t first, int64_t count) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    finish_vector(p, sums + i, up_sums + i, row, first + i, [](const float* from) { return load(from); },
                  [](float* to, Floats v) { store(to, v); });
  if (int64_t rest = count - i)
    finish_vector(p, sums + i, up_sums + i, row, first + i, [rest](const float* from) { return load_first(from, rest); },
                  [rest](float* to, Floats v) { store_first(to, v, rest); });
}

}  // namespace prejit
