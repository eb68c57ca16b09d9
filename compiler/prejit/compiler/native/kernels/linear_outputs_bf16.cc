// A strip of W is transposed once for all rows, and stays in L2:
//
//   strip: for each pair of inputs 4 vectors of 16 outputs     x: row by row, rounded; a pair is loaded into all lanes
//
// A tile is 6 rows times a strip. A sum is filled from the first pair to the last in one lane, and nothing is left to add:
// with 384 inputs, adding up lanes takes linear_dot_bf16.cc a tenth of its time. But it reads W in place, which is
// quicker for few rows.
//
// Two cores of Zen 4 at 3.7 GHz, whose limit is 236 G terms a second, with 1,024 rows (and linear_dot_bf16.cc): 384 x 1152
// 211 (171), 384 x 1536 with a GELU 189 (165), 1536 x 384 211 (191); 384 x 1536 with 128 rows 182 (169), with 16 145 (152),
// and from memory 107 (137).
#include "linear_outputs_bf16.h"

#include <atomic>

#include "linear_finish.h"
#include "linear_multiplier.h"
#include "pairs.h"
#include "threads.h"
#include "transpose.h"

namespace prejit {

#if !defined(PREJIT_HAS_PAIRS)

bool linear_by_bf16_outputs(const Linear&) { return false; }

#else

namespace {

#define PREJIT_BF16_INLINE inline __attribute__((target("avx512bf16"), always_inline))

constexpr int kVectors = 4;
constexpr int64_t kStrip = kVectors * kLanes;  // Outputs.
constexpr int kTileRows = 6;

// Maximum rows that are packed at once, and minimum rows for which a strip is transposed again, so that all threads have some.
constexpr int64_t kRowsAtOnce = 1024;
constexpr int64_t kFewestRows = 96;
constexpr int64_t kBlocksPerThread = 4;

// Rows of x as pairs.
struct PackedRows {
  int64_t first, rows, stride;
  const uint16_t* data;
};

// Transposes the weights of `count` outputs; the others of the strip are zeros.
void pack_strip(const Bf16* w, int64_t inputs, int64_t count, float* to) {
  for (int64_t first = 0; first < kStrip; first += kLanes, to += kLanes)
    for (int64_t k = 0; k < inputs; k += kPairInputs) {
      Floats pairs[kLanes];
#pragma GCC unroll 16
      for (int o = 0; o < kLanes; ++o)
        pairs[o] = first + o < count ? load_pairs(w + (first + o) * inputs + k, inputs - k) : Floats{};
      store_transposed(pairs, to + k / 2 * kStrip, kStrip);
    }
}

// sums[row, output] = x[row] . w[output] for the outputs of a strip.
template <int rows>
PREJIT_BF16_INLINE void multiply_rows(const uint16_t* x, int64_t stride, const float* strip, int64_t pairs, float* sums) {
  __m512 total[rows][kVectors] = {};
  for (int64_t k = 0; k < pairs; ++k, strip += kStrip) {
    Floats weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = in_register(load(strip + v * kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      int32_t pair;
      memcpy(&pair, x + r * stride + 2 * k, sizeof pair);
      __m512i in_all = in_register(_mm512_set1_epi32(pair));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        total[r][v] = _mm512_dpbf16_ps(total[r][v], reinterpret_cast<__m512bh>(in_all),
                                       reinterpret_cast<__m512bh>(weights[v]));
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_store_ps(sums + r * kStrip + v * kLanes, total[r][v]);
}

__attribute__((target("avx512bf16"), noinline)) void multiply_tile(const uint16_t* x, int64_t rows, int64_t stride,
                                                                   const float* strip, int64_t pairs, float* sums) {
  switch (rows) {
    case 1: return multiply_rows<1>(x, stride, strip, pairs, sums);
    case 2: return multiply_rows<2>(x, stride, strip, pairs, sums);
    case 3: return multiply_rows<3>(x, stride, strip, pairs, sums);
    case 4: return multiply_rows<4>(x, stride, strip, pairs, sums);
    case 5: return multiply_rows<5>(x, stride, strip, pairs, sums);
    default: return multiply_rows<kTileRows>(x, stride, strip, pairs, sums);
  }
}

// Computes outputs [output, output + count) of some rows of y.
bool multiply_block(const Linear& p, const PackedRows& x, int64_t output, int64_t count) {
  int64_t pairs = x.stride / 2, strip_floats = pairs * kStrip;
  float* strip = static_cast<float*>(scratch((p.gated ? 2 : 1) * strip_floats * sizeof(float) + 64, 1));
  if (!strip) return false;
  auto pack = [&](const Weights& weights, float* to) {
    pack_strip(static_cast<const Bf16*>(weights.data) + output * p.inputs, p.inputs, count, to);
  };
  pack(p.weights, strip);
  if (p.gated) pack(p.up, strip + strip_floats);
  // Threads take strips in turn, so this one's next is probably so far ahead. All tiles share its fetching: 16 outputs read
  // side by side are too many streams for the CPU to see what follows.
  int64_t lines = parts_of(kStrip * p.inputs * static_cast<int64_t>(sizeof(Bf16)), 64 * parts_of(x.rows, kTileRows));
  auto next_of = [&](const Weights& weights) {
    return static_cast<const char*>(weights.data) + (output + threads() * kStrip) * p.inputs * sizeof(Bf16);
  };
  const char *next = next_of(p.weights), *next_up = p.gated ? next_of(p.up) : nullptr;
  alignas(64) float sums[kTileRows * kStrip], up_sums[kTileRows * kStrip];
  for (int64_t row = 0; row < x.rows; row += kTileRows) {
    int64_t rows = least(x.rows - row, kTileRows);
    const uint16_t* some = x.data + row * x.stride;
    for (int64_t line = row / kTileRows * lines; line < (row / kTileRows + 1) * lines; ++line) {
      __builtin_prefetch(next + line * 64, 0, 2);
      if (p.gated) __builtin_prefetch(next_up + line * 64, 0, 2);
    }
    multiply_tile(some, rows, x.stride, strip, pairs, sums);
    if (p.gated) multiply_tile(some, rows, x.stride, strip + strip_floats, pairs, up_sums);
    for (int64_t r = 0; r < rows; ++r)
      finish(p, sums + r * kStrip, up_sums + r * kStrip, x.first + row + r, output, count);
  }
  return true;
}

}  // namespace

bool linear_by_bf16_outputs(const Linear& p) {
  int64_t stride = parts_of(p.inputs, kPairInputs) * kPairInputs;
  int64_t strips = parts_of(p.outputs, kStrip), enough = parts_of(kBlocksPerThread * threads(), strips);
  std::atomic<bool> has_memory{true};
  for (int64_t row = 0; row < p.rows; row += kRowsAtOnce) {
    int64_t rows = least(p.rows - row, kRowsAtOnce);
    uint16_t* x = static_cast<uint16_t*>(scratch(rows * stride * sizeof(uint16_t) + 64));
    if (!x) return false;
    int64_t most = least(enough, parts_of(rows, kFewestRows));
    int64_t part = parts_of(parts_of(rows, most), kTileRows) * kTileRows;
    parallel_for(parts_of(rows, kTileRows), [&](int64_t tile) {
      for (int64_t r = tile * kTileRows; r < least(rows, (tile + 1) * kTileRows); ++r)
        store_pairs(p.x + (row + r) * p.inputs, p.inputs, x + r * stride, stride);
    });
    parallel_for(strips * parts_of(rows, part), [&](int64_t block) {
      int64_t first = block / strips * part, output = block % strips * kStrip;
      PackedRows some = {row + first, least(rows - first, part), stride, x + first * stride};
      if (!multiply_block(p, some, output, least(p.outputs - output, kStrip)))
        has_memory.store(false, std::memory_order_relaxed);
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

#endif  // PREJIT_HAS_PAIRS

}  // namespace prejit
