// Floats of four bits by float32 arithmetic: 16 lanes look values up in a table, 8 or 4 lanes shift and convert them.
#include "linear_int4.h"

#include "linear_finish.h"
#include "linear_multiplier.h"
#include "threads.h"

namespace prejit {
namespace {

#define PREJIT_INT4 inline

using Element = float;

void pack(const float* x, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, rounded(load(x + i)));
  if (int64_t rest = count - i) store_first(to + i, rounded(load_first(x + i, rest)), rest);
}

template <int rows, int vectors, typename Unpacking>
PREJIT_INLINE void add(const float* x, int64_t stride, const uint32_t* words, const Unpacking& unpacking,
                       Floats (&part)[2][rows][vectors]) {
  Bits word[vectors];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; ++v) word[v] = load_as<Bits>(words + v * kLanes);
#pragma GCC unroll 8
  for (int i = 0; i < kInt4InWord; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Floats weight = unpacking.values(word[v], i / 2 * 4 + i % 2 * 16);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r)
        part[i % 2][r][v] = multiply_add(splat(x[r * stride + i]), weight, part[i % 2][r][v]);
    }
}

struct Unpacking {
#if defined(__AVX512F__)
  Floats table = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
  PREJIT_INLINE Floats values(Bits words, int low) const {
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> low), table);
  }
#else
  // Twice the value is an integer: the mantissa below 1, else 2 and the mantissa, shifted by the exponent less 1.
  PREJIT_INLINE Floats values(Bits words, int low) const {
    Bits four = words >> low, mantissa = four & 1, exponent = four >> 1 & 3;
    Bits above = reinterpret_cast<Bits>(exponent > 0);  // All bits, where it is.
    Bits twice = (mantissa | (above & 2)) << (above & (exponent - 1));
    Floats size = __builtin_convertvector(reinterpret_cast<Ints>(twice), Floats) * 0.5f;
    return reinterpret_cast<Floats>(reinterpret_cast<Bits>(size) | (four & 8) << 28);
  }
#endif
  PREJIT_INLINE Floats scale(const uint16_t* from) const { return load(reinterpret_cast<const Bf16*>(from)); }
};

#include "linear_int4_floats.h"

}  // namespace

bool linear_int4(const Linear& p) {
  if (!p.weights.is_e2m1) return linear_int4_by_integers(p);
  return multiplier() == Multiplier::kAvx512Bf16 ? linear_int4_by_bf16(p) : multiply_all(p);
}

}  // namespace prejit
