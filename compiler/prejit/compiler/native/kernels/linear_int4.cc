// int4 weights by float32 arithmetic: 16 lanes look values up in a table, 8 or 4 lanes shift and convert them.
#include "linear_int4.h"

#include "linear_finish.h"
#include "linear_multiplier.h"
#include "threads.h"

namespace prejit {
namespace {

#define PREJIT_INT4 inline

using Element = float;

PREJIT_INLINE Floats load_element(const Element* from) { return load(from); }

void pack(const float* x, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, rounded(load(x + i)));
  if (int64_t rest = count - i) store_first(to + i, rounded(load_first(x + i, rest)), rest);
}

struct Unpacking {
#if defined(__AVX512F__)
  Floats table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
  // Returns the value of four bits of each word, from bit `low` on.
  PREJIT_INLINE Floats values(Bits words, int low) const {
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(words >> low), table);
  }
#else
  PREJIT_INLINE Floats values(Bits words, int low) const {
    return __builtin_convertvector(reinterpret_cast<Ints>(words << (28 - low)) >> 28, Floats);
  }
#endif
};

template <int rows, int vectors>
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

#include "linear_int4_tiles.h"

}  // namespace

bool linear_int4(const Linear& p) {
  return multiplier() == Multiplier::kAvx512Bf16 ? linear_int4_by_bf16(p) : multiply_all(p);
}

}  // namespace prejit
