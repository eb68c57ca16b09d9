// Products of many rows by AMX's tiles, which multiply pairs of bfloat16 and sum in float32, or fours of int8.
#pragma once

#include "linear.h"

namespace prejit {

// The number of rows from which packing x and W is worth its time. Tiles take as long for 1 row as for 16. Dots take
// longer from 6 rows on, or from 8 if weights come from memory.
constexpr int64_t kFewestTileRows = 8;

// Does what linear() does for bfloat16 weights where the multiplier is kAmx. Returns false if memory is exhausted.
bool linear_by_amx(const Linear& p);

// The same for int8 weights where there are byte_tiles(), too, with at most kMostIntegerInputs: x is rounded to int8, or to 16
// bits if `is_wide` (linear_digits.h).
bool digits_by_amx(const Linear& p, bool is_wide);

}  // namespace prejit
