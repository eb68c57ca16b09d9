// Floats of four bits by AVX-512 BF16: a table of 16 bfloat16 numbers, twice, makes pairs of weights of the low bits of each half
// of a word, and vdpbf16ps multiplies them with a pair of inputs. The bit above the low four chooses the same table.
#include "linear_finish.h"
#include "linear_int4.h"
#include "linear_multiplier.h"
#include "pairs.h"
#include "threads.h"

namespace prejit {

#if !defined(PREJIT_HAS_PAIRS)

bool linear_int4_by_bf16(const Linear&) { return false; }

#else

namespace {

#define PREJIT_INT4 __attribute__((target("avx512bf16")))
#define PREJIT_INT4_INLINE inline __attribute__((target("avx512bf16"), always_inline))

using Element = uint16_t;

void pack(const float* x, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += 2 * kLanes)  // whole groups of inputs
    _mm512_storeu_si512(to + i, reinterpret_cast<__m512i>(load_pairs(x + i, count - i)));
}

template <int rows, int vectors, typename Unpacking>
PREJIT_INT4_INLINE void add(const uint16_t* x, int64_t stride, const uint32_t* words, const Unpacking& unpacking,
                            Floats (&part)[2][rows][vectors]) {
  static_assert(vectors == 1);
  __m512i word = _mm512_loadu_si512(words);
#pragma GCC unroll 4
  for (int pair = 0; pair < 4; ++pair) {
    __m512i weights = _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4 * pair), unpacking.table);
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) {
      __m512i both = _mm512_set1_epi32(load_as<int32_t>(x + r * stride + 2 * pair));
      part[pair % 2][r][0] = _mm512_dpbf16_ps(part[pair % 2][r][0], reinterpret_cast<__m512bh>(both),
                                              reinterpret_cast<__m512bh>(weights));
    }
  }
}

// 0, 0.5, .. 6 with a sign, twice.
struct Table {
  alignas(64) uint16_t values[32] = {};
  constexpr Table() {
    constexpr uint16_t sizes[8] = {0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0};
    for (int i = 0; i < 32; ++i) values[i] = static_cast<uint16_t>(sizes[i % 8] | (i % 16 < 8 ? 0 : 0x8000));
  }
};
constexpr Table kE2M1;

struct Unpacking {
  __m512i table = _mm512_load_si512(kE2M1.values);
  PREJIT_INT4_INLINE Floats scale(const uint16_t* from) const { return load(reinterpret_cast<const Bf16*>(from)); }
};

#include "linear_int4_floats.h"

}  // namespace

bool linear_int4_by_bf16(const Linear& p) { return multiply_all(p); }

#endif  // PREJIT_HAS_PAIRS

}  // namespace prejit
