// The instructions that multiply weights on this CPU.
#pragma once

#include "simd.h"

namespace prejit {

// Defined if the compiler has the instructions, shown by its headers: GCC 11, clang 11. The CPU is checked at run time.
#if defined(__AVX512F__) && __has_include(<avx512bf16intrin.h>) && \
    (__has_include(<amxbf16intrin.h>) /* GCC */ || __has_include(<amxintrin.h>) /* clang */)
#define PREJIT_HAS_PAIRS
#endif

// Defined if the compiler has the instructions that multiply bytes, in vectors and in tiles: GCC 11, clang 12.
#if defined(__AVX2__) && __has_include(<avxvnniintrin.h>)
#define PREJIT_HAS_VNNI
#if __has_include(<amxint8intrin.h>) /* GCC */ || __has_include(<amxintrin.h>) /* clang */
#define PREJIT_HAS_BYTE_TILES
#endif
#endif

// How bfloat16 weights are multiplied. MXFP4 has no kAmx. Integers have vnni and byte_tiles instead; int8 weights use tiles
// with kAmx only.
enum class Multiplier {
  kFloat32,     // Like float32 weights, with x rounded.
  kAvx512Bf16,  // vdpbf16ps: 16 pairs at once, twice the terms of an FMA (linear_dot_bf16.h).
  kAmx,         // tdpbf16ps: 16 x 16 sums of 16 pairs, for many rows (linear_amx.h); few rows like kFloat32.
};

// Returns the best one that the CPU, the operating system and the compiler support; constant within a process.
Multiplier multiplier();

// Uses another one from now on, for tests. Returns whether this machine supports it.
bool use_multiplier(Multiplier wanted);

// Returns whether this CPU has the VNNI of the library's level: AVX-512's or AVX's. It changes no number.
bool vnni();

// Returns whether this CPU has AMX for bytes, and the operating system permits it (linear_int4_amx.cc, linear_amx.cc). It
// changes no number, either.
bool byte_tiles();

// Uses each or not from now on, for tests. Returns whether this machine supports that.
bool use_vnni(bool wanted);
bool use_byte_tiles(bool wanted);

}  // namespace prejit
