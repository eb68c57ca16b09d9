// Products of many rows by the CPU's bfloat16 instructions, which multiply pairs and sum in float32.
#pragma once

#include "linear.h"

namespace prejit {

// How many rows are multiplied by bfloat16 and int8 weights.
enum class Multiplier {
  kFloat32,     // Like float32 weights, with x rounded.
  kAvx512Bf16,  // vdpbf16ps: 16 pairs at once, twice the terms of an FMA.
  kAmx,         // tdpbf16ps: 16 x 16 sums of 16 pairs.
};

// Returns the best one that the CPU, the operating system and the compiler support; constant within a process.
Multiplier multiplier();

// Uses another one from now on, for tests. Returns whether this machine supports it.
bool use_multiplier(Multiplier wanted);

// Returns the number of rows from which packing x and W for a multiplier is worth its time.
int64_t fewest_packed_rows(Multiplier multiplier);

// Does what linear() does for bfloat16 or int8 weights, by a multiplier other than kFloat32. Returns false if memory is
// exhausted.
bool linear_by_pairs(const Linear& p, Multiplier multiplier);

}  // namespace prejit
