// Transposes a square of floats in registers.
#pragma once

#include "simd.h"

namespace prejit {

// Lane j of v[i] becomes lane i of v[j].
PREJIT_INLINE void transpose(Floats (&v)[kLanes]) {
#if defined(__AVX512F__)
  Floats t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    __m512 a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpackhi_ps(v[i], v[i + 1]);
    __m512 c = _mm512_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
    t[i] = _mm512_shuffle_ps(a, c, 0x44), t[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm512_shuffle_ps(b, d, 0x44), t[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  // t[4 q + c] holds, in each quarter p, column 4 p + c of rows 4 q .. 4 q + 3.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512 a = _mm512_shuffle_f32x4(t[c], t[4 + c], 0x88), b = _mm512_shuffle_f32x4(t[8 + c], t[12 + c], 0x88);
    __m512 d = _mm512_shuffle_f32x4(t[c], t[4 + c], 0xDD), e = _mm512_shuffle_f32x4(t[8 + c], t[12 + c], 0xDD);
    v[c] = _mm512_shuffle_f32x4(a, b, 0x88), v[8 + c] = _mm512_shuffle_f32x4(a, b, 0xDD);
    v[4 + c] = _mm512_shuffle_f32x4(d, e, 0x88), v[12 + c] = _mm512_shuffle_f32x4(d, e, 0xDD);
  }
#elif defined(__AVX2__)
  Floats t[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    __m256 a = _mm256_unpacklo_ps(v[i], v[i + 1]), b = _mm256_unpackhi_ps(v[i], v[i + 1]);
    __m256 c = _mm256_unpacklo_ps(v[i + 2], v[i + 3]), d = _mm256_unpackhi_ps(v[i + 2], v[i + 3]);
    t[i] = _mm256_shuffle_ps(a, c, 0x44), t[i + 1] = _mm256_shuffle_ps(a, c, 0xEE);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44), t[i + 3] = _mm256_shuffle_ps(b, d, 0xEE);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    v[c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x20);
    v[4 + c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x31);
  }
#else
  _MM_TRANSPOSE4_PS(v[0], v[1], v[2], v[3]);
#endif
}

// to[j, i] = lane j of v[i].
PREJIT_INLINE void store_transposed(Floats (&v)[kLanes], float* to, int64_t stride) {
  transpose(v);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) store(to + i * stride, v[i]);
}

}  // namespace prejit
