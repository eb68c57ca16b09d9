// Products of many rows in bfloat16 arithmetic: the CPU's own products of pairs, summed in float32.
#pragma once

#include "linear.h"

namespace prejit {

// What multiplies many rows by bfloat16 and int8 weights.
enum class Multiplier {
  kFloat32,     // As float32 weights are, x rounded.
  kAvx512Bf16,  // vdpbf16ps: 16 pairs at once, twice the terms of an FMA.
  kAmx,         // tdpbf16ps: 16 x 16 sums of 16 pairs.
};

// The best that this CPU has, its kernel lets us use and this compiler knew; the same for the whole process.
Multiplier multiplier();

// Takes another from now on, for tests. Returns whether this machine has it.
bool use_multiplier(Multiplier wanted);

// From so many rows on, packing x and W for a multiplier pays for itself.
int64_t fewest_packed_rows(Multiplier multiplier);

// linear() for weights of bfloat16 or int8, by a multiplier other than kFloat32. Returns whether memory was there.
bool linear_by_pairs(const Linear& p, Multiplier multiplier);

}  // namespace prejit
