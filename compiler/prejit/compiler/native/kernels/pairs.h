// 32 bfloat16 in a vector, as the CPU's bfloat16 instructions read them: 16 pairs. Only with AVX-512.
#pragma once

#include "simd.h"

#if defined(__AVX512F__)

namespace prejit {

// Packs two vectors of floats that are bfloat16 values into 32 bfloat16.
PREJIT_INLINE Floats pairs_of(Floats low, Floats high) {
  const __m512i upper_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                                31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return reinterpret_cast<Floats>(_mm512_permutex2var_epi16(reinterpret_cast<__m512i>(low), upper_halves,
                                                            reinterpret_cast<__m512i>(high)));
}

constexpr int64_t kPairInputs = 2 * kLanes;  // Of a vector.

// Loads 32 numbers, or the first `count` and zeros, as bfloat16.
PREJIT_INLINE Floats load_pairs(const float* from, int64_t count) {
  return pairs_of(rounded(load_some(from, count)), rounded(load_some(from + kLanes, count - kLanes)));
}
PREJIT_INLINE Floats load_pairs(const Bf16* from, int64_t count) {
  if (count >= 2 * kLanes) return load_as<Floats>(from);
  return reinterpret_cast<Floats>(_mm512_maskz_loadu_epi16((uint32_t{1} << count) - 1, from));
}

// to[k] = x[k], rounded, then zeros up to `size`, which is whole vectors.
inline void store_pairs(const float* x, int64_t inputs, uint16_t* to, int64_t size) {
  for (int64_t k = 0; k < size; k += kPairInputs)
    store(reinterpret_cast<float*>(to + k), load_pairs(x + k, inputs - k));
}

}  // namespace prejit

#endif
