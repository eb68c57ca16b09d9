// A model by AVX2 of the AVX-512 that products of few bits use. A compiler for x86-64-v3 includes it before a source
// (-include), which then is that of x86-64-v4: a CPU without AVX-512 runs what surrounds AMX's tiles (amx_model.h).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__)
#define __AVX512F__ 1

namespace avx512_model {

#define MODEL inline __attribute__((always_inline))

template <typename To, typename From>
MODEL To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
template <typename Half>
struct Halves {
  Half low, high;
};
template <typename Half, typename Whole>
MODEL Halves<Half> halves(const Whole& of) {
  return as<Halves<Half>>(of);
}

// For instructions that treat each 256 bits alike.
#define MODEL_OF_HALVES(whole, half, name, of)                       \
  MODEL whole name(whole a, whole b) {                               \
    auto x = halves<half>(a), y = halves<half>(b);                   \
    return as<whole>(Halves<half>{of(x.low, y.low), of(x.high, y.high)}); \
  }
MODEL_OF_HALVES(__m512, __m256, unpacklo_ps, _mm256_unpacklo_ps)
MODEL_OF_HALVES(__m512, __m256, unpackhi_ps, _mm256_unpackhi_ps)
MODEL_OF_HALVES(__m512i, __m256i, madd_epi16, _mm256_madd_epi16)
MODEL_OF_HALVES(__m512i, __m256i, maddubs_epi16, _mm256_maddubs_epi16)

MODEL __m512 castps256(__m256 low, __m256 high) { return as<__m512>(Halves<__m256>{low, high}); }
MODEL __m512i castsi256(__m256i low, __m256i high) { return as<__m512i>(Halves<__m256i>{low, high}); }
MODEL __m256 first(__m512 a) { return halves<__m256>(a).low; }
template <int at>
MODEL __m256 extractf32x8(__m512 a) {
  return at ? halves<__m256>(a).high : halves<__m256>(a).low;
}
MODEL __m512 cvtepi32_ps(__m512i a) {
  auto x = halves<__m256i>(a);
  return castps256(_mm256_cvtepi32_ps(x.low), _mm256_cvtepi32_ps(x.high));
}
MODEL __m512i cvtps_epi32(__m512 a) {
  auto x = halves<__m256>(a);
  return castsi256(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
}
MODEL __m512i cvtepi8_epi32(__m128i a) {
  return castsi256(_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8)));
}
MODEL __m512i cvtepu16_epi32(__m256i a) {
  auto x = halves<__m128i>(a);
  return castsi256(_mm256_cvtepu16_epi32(x.low), _mm256_cvtepu16_epi32(x.high));
}
MODEL __m512 cvtph_ps(__m256i a) {
  auto x = halves<__m128i>(a);
  return castps256(_mm256_cvtph_ps(x.low), _mm256_cvtph_ps(x.high));
}
MODEL __m128i cvtepi32_epi8(__m512i a) {
  int32_t wide[16];
  int8_t narrow[16];
  memcpy(wide, &a, sizeof wide);
  for (int i = 0; i < 16; ++i) narrow[i] = static_cast<int8_t>(wide[i]);
  return as<__m128i>(narrow);
}
MODEL __m512i cvtepi8_epi16(__m256i a) {
  __m128i parts[2];
  memcpy(parts, &a, sizeof parts);
  return castsi256(_mm256_cvtepi8_epi16(parts[0]), _mm256_cvtepi8_epi16(parts[1]));
}
MODEL __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  auto x = halves<__m256>(a), y = halves<__m256>(b), z = halves<__m256>(c);
  return castps256(_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high));
}
MODEL __m512i slli_epi32(__m512i a, int count) {
  auto x = halves<__m256i>(a);
  return castsi256(_mm256_slli_epi32(x.low, count), _mm256_slli_epi32(x.high, count));
}
template <int at>
MODEL __m512 shuffle_ps(__m512 a, __m512 b) {
  auto x = halves<__m256>(a), y = halves<__m256>(b);
  return castps256(_mm256_shuffle_ps(x.low, y.low, at), _mm256_shuffle_ps(x.high, y.high, at));
}
template <int at>
MODEL __m512 shuffle_f32x4(__m512 a, __m512 b) {
  __m128 x[4], y[4];
  memcpy(x, &a, sizeof x), memcpy(y, &b, sizeof y);
  __m128 found[4] = {x[at & 3], x[at >> 2 & 3], y[at >> 4 & 3], y[at >> 6 & 3]};
  return as<__m512>(found);
}

MODEL __m512 set1_ps(float a) { return castps256(_mm256_set1_ps(a), _mm256_set1_ps(a)); }
MODEL __m512i set1_epi16(short a) { return castsi256(_mm256_set1_epi16(a), _mm256_set1_epi16(a)); }
template <typename... Numbers>
MODEL __m512i set_epi16(Numbers... numbers) {
  short in_order[32] = {static_cast<short>(numbers)...}, reversed[32];
  for (int i = 0; i < 32; ++i) reversed[i] = in_order[31 - i];
  return as<__m512i>(reversed);
}
MODEL __m512i permutex2var_epi16(__m512i a, __m512i places, __m512i b) {
  uint16_t from[64], at[32], found[32];
  memcpy(from, &a, 64), memcpy(from + 32, &b, 64), memcpy(at, &places, 64);
  for (int i = 0; i < 32; ++i) found[i] = from[at[i] & 63];
  return as<__m512i>(found);
}
MODEL __m512 permutexvar_ps(__m512i places, __m512 a) {
  uint32_t from[16], at[16], found[16];
  memcpy(from, &a, 64), memcpy(at, &places, 64);
  for (int i = 0; i < 16; ++i) found[i] = from[at[i] & 15];
  return as<__m512>(found);
}

// Nothing is read where a mask has no bit.
template <typename Vector, typename Element>
MODEL Vector load_masked(uint64_t mask, const void* memory) {
  Element found[sizeof(Vector) / sizeof(Element)] = {};
  for (unsigned i = 0; i < sizeof(Vector) / sizeof(Element); ++i)
    if (mask >> i & 1) memcpy(found + i, static_cast<const Element*>(memory) + i, sizeof(Element));
  return as<Vector>(found);
}

#undef MODEL
#undef MODEL_OF_HALVES

}  // namespace avx512_model

#undef _mm512_extractf32x8_ps
#undef _mm512_shuffle_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_slli_epi32
#define _mm512_castps512_ps256 avx512_model::first
#define _mm512_extractf32x8_ps(a, at) avx512_model::extractf32x8<at>(a)
#define _mm512_cvtepi32_ps avx512_model::cvtepi32_ps
#define _mm512_cvtps_epi32 avx512_model::cvtps_epi32
#define _mm512_cvtepi8_epi32 avx512_model::cvtepi8_epi32
#define _mm512_cvtepi8_epi16 avx512_model::cvtepi8_epi16
#define _mm512_cvtepu16_epi32 avx512_model::cvtepu16_epi32
#define _mm512_cvtph_ps avx512_model::cvtph_ps
#define _mm512_cvtepi32_epi8 avx512_model::cvtepi32_epi8
#define _mm512_fmadd_ps avx512_model::fmadd_ps
#define _mm512_slli_epi32 avx512_model::slli_epi32
#define _mm512_shuffle_ps(a, b, at) avx512_model::shuffle_ps<at>(a, b)
#define _mm512_shuffle_f32x4(a, b, at) avx512_model::shuffle_f32x4<at>(a, b)
#define _mm512_unpacklo_ps avx512_model::unpacklo_ps
#define _mm512_unpackhi_ps avx512_model::unpackhi_ps
#define _mm512_madd_epi16 avx512_model::madd_epi16
#define _mm512_maddubs_epi16 avx512_model::maddubs_epi16
#define _mm512_set1_ps avx512_model::set1_ps
#define _mm512_set1_epi16 avx512_model::set1_epi16
#define _mm512_set_epi16 avx512_model::set_epi16
#define _mm512_permutex2var_epi16 avx512_model::permutex2var_epi16
#define _mm512_permutexvar_ps avx512_model::permutexvar_ps
#define _mm512_maskz_loadu_ps avx512_model::load_masked<__m512, float>
#define _mm512_maskz_loadu_epi8 avx512_model::load_masked<__m512i, uint8_t>
#define _mm512_maskz_loadu_epi16 avx512_model::load_masked<__m512i, uint16_t>
#define _mm256_maskz_loadu_epi16 avx512_model::load_masked<__m256i, uint16_t>
#define _mm_maskz_loadu_epi8 avx512_model::load_masked<__m128i, uint8_t>
// No register holds a vector of 512 bits (in_register in simd.h).
#define asm(...)

#endif
