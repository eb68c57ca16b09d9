// Products of any number of rows by AVX-512 BF16: vdpbf16ps multiplies pairs of bfloat16 and sums in float32.
#pragma once

#include "linear.h"

namespace prejit {

// Does what linear() does for bfloat16 weights where the multiplier is kAvx512Bf16. The result of a row does not
// depend on the other rows, nor on their number. Returns false if memory is exhausted.
bool linear_by_bf16_dots(const Linear& p);

}  // namespace prejit
