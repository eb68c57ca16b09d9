// Integers of four bits by integer products. 32 x are rounded to -127 .. 127 with one scale. A word has the
// inputs 0, 4, 1, 5 in the low halves of its bytes and 2, 6, 3, 7 in the high ones; so do x, and one instruction multiplies
// and adds bytes of 0 .. 15 and of -127 .. 127. Integers are 8 less than the bytes, which the sum of x corrects.
//
// All sums of 32 products are exact, so that levels and instructions differ in multiply_add alone.
#include "linear_finish.h"
#include "linear_int4.h"
#include "linear_int4_round.h"
#include "linear_multiplier.h"
#include "threads.h"

namespace prejit {
namespace {

struct Packed {
  static constexpr bool kTakesZeros = true;
  const int8_t* x;
  // [row, inputs / 32]: the scales of 32 x, and minus the sums of their bytes.
  const float *scales, *sums;
  int64_t inputs;

  static int64_t bytes(int64_t rows, int64_t inputs) {
    return rows * (inputs + inputs / kInt4Group * 2 * static_cast<int64_t>(sizeof(float))) + 64;
  }
  Packed(const float* from, int64_t rows, int64_t inputs, void* memory) : inputs(inputs) {
    int64_t groups = rows * inputs / kInt4Group;
    int8_t* to = static_cast<int8_t*>(memory);
    float *of_scales = reinterpret_cast<float*>(to + groups * kInt4Group), *of_sums = of_scales + groups;
    parallel_for(parts_of(groups, kPackedAtOnce / kInt4Group), [&](int64_t part) {
      int64_t end = least((part + 1) * kPackedAtOnce / kInt4Group, groups);
      for (int64_t i = part * kPackedAtOnce / kInt4Group; i < end; ++i)
        of_scales[i] = round_group(from + i * kInt4Group, to + i * kInt4Group, of_sums[i]);
    });
    x = to, scales = of_scales, sums = of_sums;
  }
  Packed behind(int64_t rows) const {
    Packed rest = *this;
    rest.x += rows * inputs, rest.scales += rows * inputs / kInt4Group, rest.sums += rows * inputs / kInt4Group;
    return rest;
  }
};

// Pairs of products in halves of lanes, which hold all 16 of a group: at most 16 x 15 x 127.
namespace pairs {

#define PREJIT_INT4 inline

using Sums = VectorOf<int16_t, 2 * kLanes>::type;

#if defined(__AVX512F__)
PREJIT_INLINE Sums add(Sums sums, Bits weights, Bits x) {
  return sums + reinterpret_cast<Sums>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights), reinterpret_cast<__m512i>(x)));
}
PREJIT_INLINE Floats total_of(Sums v) {
  return _mm512_cvtepi32_ps(_mm512_madd_epi16(reinterpret_cast<__m512i>(v), _mm512_set1_epi16(1)));
}
#elif defined(__AVX2__)
PREJIT_INLINE Sums add(Sums sums, Bits weights, Bits x) {
  __m256i products = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights), reinterpret_cast<__m256i>(x));
  return in_register(sums + reinterpret_cast<Sums>(products));
}
PREJIT_INLINE Floats total_of(Sums v) {
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(reinterpret_cast<__m256i>(v), _mm256_set1_epi16(1)));
}
#else
PREJIT_INLINE Sums add(Sums sums, Bits weights, Bits x) {
  __m128i products = _mm_maddubs_epi16(reinterpret_cast<__m128i>(weights), reinterpret_cast<__m128i>(x));
  return in_register(sums + reinterpret_cast<Sums>(products));
}
PREJIT_INLINE Floats total_of(Sums v) {
  return _mm_cvtepi32_ps(_mm_madd_epi16(reinterpret_cast<__m128i>(v), _mm_set1_epi16(1)));
}
#endif

#include "linear_int4_integers.h"

#undef PREJIT_INT4

}  // namespace pairs

#if defined(PREJIT_HAS_VNNI)

// One instruction multiplies and adds four bytes of each lane.
namespace fours {

#if defined(__AVX512F__)
#define PREJIT_INT4 inline __attribute__((target("avx512vnni")))
#define PREJIT_DOT _mm512_dpbusd_epi32
#define PREJIT_WIDEN _mm512_cvtepi32_ps
using Sums = __m512i;
#else
#define PREJIT_INT4 inline __attribute__((target("avxvnni")))
#define PREJIT_DOT _mm256_dpbusd_avx_epi32
#define PREJIT_WIDEN _mm256_cvtepi32_ps
using Sums = __m256i;
#endif

PREJIT_INT4 __attribute__((always_inline)) Sums add(Sums sums, Bits weights, Bits x) {
  return PREJIT_DOT(sums, reinterpret_cast<Sums>(weights), reinterpret_cast<Sums>(x));
}
PREJIT_INLINE Floats total_of(Sums v) { return PREJIT_WIDEN(v); }

#include "linear_int4_integers.h"

}  // namespace fours

#endif

}  // namespace

bool linear_int4_by_integers(const Linear& p) {
  if (p.rows >= kFewestInt4TileRows && byte_tiles()) return linear_int4_by_tiles(p);
#if defined(PREJIT_HAS_VNNI)
  if (vnni()) return fours::multiply_all(p);
#endif
  return pairs::multiply_all(p);
}

}  // namespace prejit
