// Rounds x to int8 for integers of four bits.
#pragma once

#include "linear_int4.h"
#include "simd.h"

namespace prejit {

// Rounds 32 x to bytes, in the order of words, and returns their scale. `sum` becomes minus their sum.
inline float round_group(const float* x, int8_t* to, float& sum) {
  __m128i largest = _mm_setzero_si128();
  for (int i = 0; i < kInt4Group; i += 4)  // The bits of sizes are in the order of sizes, NaN above infinity.
    largest = _mm_max_epi32(largest, _mm_and_si128(load_as<__m128i>(x + i), _mm_set1_epi32(0x7FFFFFFF)));
  largest = _mm_max_epi32(largest, _mm_shuffle_epi32(largest, 0x4E));
  largest = _mm_max_epi32(largest, _mm_shuffle_epi32(largest, 0xB1));
  float most = _mm_cvtss_f32(_mm_castsi128_ps(largest));
  // Every output becomes NaN. Where 127 / most would be infinite, x is nothing beside other numbers.
  bool is_finite = most < __builtin_inff(), is_some = is_finite && most > 0x1p-100f;
  __m128 inverse = _mm_set1_ps(is_some ? 127 / most : 0);
  const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  __m128i sums = _mm_setzero_si128();
  for (int i = 0; i < kInt4Group; i += 16) {
    auto four = [&](int at) { return _mm_cvtps_epi32(_mm_mul_ps(load_as<__m128>(x + i + at), inverse)); };
    __m128i low = _mm_packs_epi32(four(0), four(4)), high = _mm_packs_epi32(four(8), four(12));
    sums = _mm_add_epi32(sums, _mm_madd_epi16(_mm_add_epi16(low, high), _mm_set1_epi16(-1)));
    __m128i bytes = _mm_shuffle_epi8(_mm_packs_epi16(low, high), order);
    bytes = is_finite ? bytes : _mm_setzero_si128();
    memcpy(to + i, &bytes, 16);
  }
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4E));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xB1));
  sum = static_cast<float>(_mm_cvtsi128_si32(sums));
  return is_finite ? is_some ? most / 127 : 0 : __builtin_nanf("");
}

}  // namespace prejit
