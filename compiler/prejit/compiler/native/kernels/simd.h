// Vectors as wide as the x86-64 level of the library has them, and loads that widen to float32. All kernels use it.
//
// The vector extensions of GCC and clang let arithmetic be written once for x86-64-v2, v3 and v4. A vector wider than
// the ABI's must not cross a call, so every function that takes or returns one is PREJIT_INLINE.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace prejit {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#define PREJIT_FLOATS(operation) _mm512_##operation##_ps
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#define PREJIT_FLOATS(operation) _mm256_##operation##_ps
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#define PREJIT_FLOATS(operation) _mm_##operation##_ps
#endif

// A bfloat16 as stored: the upper half of a float32.
struct Bf16 {
  uint16_t bits;
};

template <typename T, int lanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * lanes)));
};
using Floats = VectorOf<float, kLanes>::type;
using Ints = VectorOf<int32_t, kLanes>::type;
using Bits = VectorOf<uint32_t, kLanes>::type;

#define PREJIT_INLINE inline __attribute__((always_inline))

// Arrays are aligned to their elements only. Copying a vector compiles to an unaligned load.
template <typename V>
PREJIT_INLINE V load_as(const void* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}
PREJIT_INLINE Floats load(const float* from) { return load_as<Floats>(from); }

// Widening uses intrinsics because GCC 12 compiles __builtin_convertvector of bytes to one load for each byte.
PREJIT_INLINE Floats load(const Bf16* from) {
#if defined(__AVX512F__)
  __m512i wide = _mm512_cvtepu16_epi32(load_as<__m256i>(from));
  return reinterpret_cast<Floats>(_mm512_slli_epi32(wide, 16));
#elif defined(__AVX2__)
  __m256i wide = _mm256_cvtepu16_epi32(load_as<__m128i>(from));
  return reinterpret_cast<Floats>(_mm256_slli_epi32(wide, 16));
#else
  __m128i halves = _mm_cvtsi64_si128(load_as<int64_t>(from));
  return reinterpret_cast<Floats>(_mm_unpacklo_epi16(_mm_setzero_si128(), halves));
#endif
}
PREJIT_INLINE Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load_as<int64_t>(from))));
#else
  return _mm_cvtepi32_ps(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(load_as<int32_t>(from))));
#endif
}

// Loads finite float16 numbers.
PREJIT_INLINE Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps(load_as<__m128i>(from));
#else
  __m128i half = _mm_unpacklo_epi16(_mm_cvtsi64_si128(load_as<int64_t>(from)), _mm_setzero_si128());
  Bits bits = reinterpret_cast<Bits>(half);
  Floats size = reinterpret_cast<Floats>((bits & 0x7FFF) << 13) * 0x1p112f;  // subnormal numbers, too
  return reinterpret_cast<Floats>(reinterpret_cast<Bits>(size) | (bits & 0x8000) << 16);
#endif
}

// Loads the first `count` elements, 0 < count < kLanes, then zeros. Nothing behind the array is read.
template <typename T>
PREJIT_INLINE Floats load_first(const T* from, int64_t count) {
#if defined(__AVX512F__)
  __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (sizeof(T) == 4) {
    return _mm512_maskz_loadu_ps(mask, from);
  } else if constexpr (sizeof(T) == 2) {
    __m256i halves = _mm256_maskz_loadu_epi16(mask, from);
    return load(reinterpret_cast<const T*>(&halves));
  } else {
    __m128i bytes = _mm_maskz_loadu_epi8(mask, from);
    return load(reinterpret_cast<const T*>(&bytes));
  }
#else
  T whole[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) whole[i] = from[i];
  return load(whole);
#endif
}

// Loads as many elements as there are of a vector, then zeros.
template <typename T>
PREJIT_INLINE Floats load_some(const T* from, int64_t count) {
  return count >= kLanes ? load(from) : count > 0 ? load_first(from, count) : Floats{};
}

PREJIT_INLINE void store(float* to, Floats v) { memcpy(to, &v, sizeof v); }
PREJIT_INLINE void store_first(float* to, Floats v, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = v[i];
}

PREJIT_INLINE Floats splat(float value) { return PREJIT_FLOATS(set1)(value); }

// Both return b where an element is NaN, as their instructions do: GCC compiles a comparison to two instructions.
PREJIT_INLINE Floats maximum(Floats a, Floats b) { return PREJIT_FLOATS(max)(a, b); }
PREJIT_INLINE Floats minimum(Floats a, Floats b) { return PREJIT_FLOATS(min)(a, b); }

// Rounds to the nearest bfloat16, ties to even. NaN stays NaN, and values beyond the greatest become infinite.
PREJIT_INLINE Floats rounded(Floats v) {
  Bits bits = reinterpret_cast<Bits>(v);
  bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
  return v == v ? reinterpret_cast<Floats>(bits) : splat(__builtin_nanf(""));
}

// Returns a b + c, rounded once if the level has FMA. Without this a compiler fuses in one loop and not in another, and
// the result of a row then depends on its neighbours.
PREJIT_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX2__)
  return PREJIT_FLOATS(fmadd)(a, b, c);
#else
  return a * b + c;
#endif
}

// Returns a vector that is in a register where this stands. GCC makes all products of integers in a loop before it adds
// them, and 16 registers do not hold them; and it loads an operand again for each of its instructions.
template <typename V>
PREJIT_INLINE V in_register(V v) {
  asm("" : "+v"(v));
  return v;
}

// Returns the sum of the lanes, always in one order: halves are added to halves.
PREJIT_INLINE float sum(Floats v) {
#if defined(__AVX512F__)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
  __m256 eight = v;
#endif
#if defined(__AVX2__)
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
#else
  __m128 four = v;
#endif
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

}  // namespace prejit
