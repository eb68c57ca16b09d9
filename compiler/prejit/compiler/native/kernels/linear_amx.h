// Products of many rows by AMX's tiles, which multiply pairs of bfloat16 and sum in float32.
#pragma once

#include "linear.h"

namespace prejit {

// The number of rows from which packing x and W is worth its time. Tiles take as long for 1 row as for 16. Dots take
// longer from 6 rows on, or from 8 if weights come from memory.
constexpr int64_t kFewestTileRows = 8;

// Does what linear() does for bfloat16 or int8 weights where the multiplier is kAmx. Returns false if memory is exhausted.
bool linear_by_amx(const Linear& p);

}  // namespace prejit
