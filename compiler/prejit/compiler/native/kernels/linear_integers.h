// Products of int8 weights with x rounded to integers: each row of x has one scale, and sums are exact.
#pragma once

#include "linear.h"

namespace prejit {

// Sums of more products might not fit 32 bits.
constexpr int64_t kMostIntegerInputs = 1 << 16;

// Does what linear() does for int8 weights, with x rounded row by row to int8, or to 16 bits where that would be too coarse
// (linear_digits.h). The number of rows, and how bytes are multiplied, change no bit. For more inputs it is linear(). Returns
// false if memory is exhausted.
bool linear_by_integers(const Linear& p);

// The same with each row in 16 bits. For at most kMostIntegerInputs.
bool linear_by_fixed_point(const Linear& p);

}  // namespace prejit
