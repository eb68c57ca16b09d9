// Products of tokens with the matrices of their experts, where those lie: y[pair] = act(x W_e^T) [* (x U_e^T)].
//
//   pairs   0 .. R * chosen - 1, one for each token and each of its experts
//   W       [E, N, K]; if gated [E, 2 N, K]: the first N outputs of each expert are W, the others U
//
// The rows of one expert are one Linear, so that it reads its matrix once, and the sums have that Linear's order. Which
// order it is depends on the mean number of rows of an expert: a token must not depend on who else has its expert.
#pragma once

#include "linear.h"

namespace prejit {

struct ExpertProducts {
  int64_t experts = 0;      // E
  int64_t pairs = 0;
  int64_t row_pairs = 1;    // Adjacent pairs that have one row of x.
  const int32_t* expert = nullptr;  // [pairs], each below E.
  Linear each;              // `inputs`, `outputs` (N), `x`, `y` [pairs, N], `weights` of all experts, `gated`, `activation`
};

// Computes y on this thread and the helpers. Returns false if memory is exhausted.
bool expert_products(const ExpertProducts& products);

}  // namespace prejit
