// Products of int8 weights with x rounded to integers: each row of x has one scale, and sums are exact.
#pragma once

#include "linear.h"

namespace prejit {

// Sums of more products might not fit 32 bits.
constexpr int64_t kMostIntegerInputs = 1 << 16;

// Does what linear() does for int8 weights, with x rounded to int8 row by row instead of to 16 bits. The result of a row
// depends on that row alone, and but for the last rounding is the same on every CPU. With AMX, and for more inputs, it is
// linear(). Returns false if memory is exhausted.
bool linear_by_integers(const Linear& p);

// Does what linear() does for int8 weights, with x rounded row by row to 16 bits. The number of rows, and how bytes are
// multiplied, change no bit. For at most kMostIntegerInputs.
bool linear_by_fixed_point(const Linear& p);

}  // namespace prejit
