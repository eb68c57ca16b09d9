// Products of many rows by AVX-512 BF16, each lane an output.
#pragma once

#include "linear.h"

namespace prejit {

// Does what linear() does for bfloat16 weights with `many_rows` where the multiplier is kAvx512Bf16. The result of a row
// does not depend on the other rows, nor on their number. Returns false if memory is exhausted.
bool linear_by_bf16_outputs(const Linear& p);

}  // namespace prejit
