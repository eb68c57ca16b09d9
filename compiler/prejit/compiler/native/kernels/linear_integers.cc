// Lanes are outputs. A strip of W is copied so that a vector has 4 inputs of each of its outputs, and is multiplied with
// all rows while it is in L1 or L2; a tile has few rows and the outputs of a strip, whose sums are in registers:
//
//   W [64 outputs, K] -> [K / 4][64][4]     then rows 0 .. 5, 6 .. 11, ...: x[row, 4 k .. 4 k + 3] is one broadcast
//
// x = s (q + zero), q from -127 to 127, so that what an activation leaves on one side of 0 has all steps. If a few numbers
// of a row are much larger than the others, which would get few steps, it is multiplied twice: what q leaves is s r / 254.
//
// The instruction multiplies bytes without a sign by bytes with one, so 128 is added to weights. Sums begin at what that
// adds, and at the zero of a row times the sum of an output's weights. Without that instruction x and the strip are widened
// to 16 bits, and 2 inputs are multiplied at a time: to widen a strip for each tile again cost a fifth of the time (AVX2).
#include "linear_integers.h"

#include <atomic>

#include "linear_finish.h"
#include "linear_multiplier.h"
#include "threads.h"
#include "transpose.h"

namespace prejit {
namespace {

#if defined(PREJIT_HAS_VNNI)
#if defined(__AVX512F__)
#define PREJIT_VNNI "avx512vnni"
using Bytes = __m512i;
#define PREJIT_ADD_DOTS _mm512_dpbusd_epi32
#else
#define PREJIT_VNNI "avxvnni"
using Bytes = __m256i;
#define PREJIT_ADD_DOTS _mm256_dpbusd_avx_epi32
#endif
inline __attribute__((target(PREJIT_VNNI), always_inline)) Ints add_dots(Ints to, Ints w, Ints x) {
  return reinterpret_cast<Ints>(
      PREJIT_ADD_DOTS(reinterpret_cast<Bytes>(to), reinterpret_cast<Bytes>(w), reinterpret_cast<Bytes>(x)));
}
#endif

// The sums, a row's broadcast, a strip's vectors and a product are in registers: GCC spills 5 x 2, and 4 x 2 is a tenth slower.
constexpr int kTileRows = kRegisters == 32 ? 6 : 3;
constexpr int kVectors = kRegisters == 32 ? 4 : 3;
constexpr int64_t kStripOutputs = kVectors * kLanes;
constexpr int kStep = 4;              // Bytes of a lane in a step: 4 inputs, or 2 of 16 bits.
constexpr int kAtOnce = kStep * kLanes;  // Inputs that are rounded or copied at once.
constexpr int64_t kApart = 64;        // Bytes between rows of x, which would share sets of L1 if they were whole pages.

// Maximum rows whose sums are in memory at once, and rows that are rounded at once: they stay in L2 while strips pass.
constexpr int64_t kBlockRows = 8 * kTileRows;
constexpr int64_t kRowBytes = 4 << 20;
constexpr int64_t kMostRowsAtOnce = 1024;

// The range of a row has so many steps. 0 lies on one; rounding the range's ends may take one more.
constexpr float kSteps = 253;
// A row whose numbers have a mean size of fewer steps has second digits, in so many parts of a step. One digit has an error
// of at most 1 / (16 sqrt(12)) = 1.8 % then; normally distributed numbers have 30 steps and 0.7 %, as int8 weights have. A root
// mean square would not show that some large channels, beside small weights, leave the others few steps.
constexpr int64_t kFewSteps = 16;
constexpr float kDigit = 254;
// A smaller range of a row is taken for this one, because the number of steps divided by it would not be finite.
constexpr float kLeastRange = 1e-35f;
// Sums of more products might not fit 32 bits.
constexpr int64_t kMostInputs = 1 << 16;

PREJIT_INLINE Ints nearest(Floats v) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtps_epi32(v));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(v));
#else
  return reinterpret_cast<Ints>(_mm_cvtps_epi32(v));
#endif
}
PREJIT_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Multiplies pairs of 16 bits and adds the two products of a lane.
PREJIT_INLINE Ints dots_of_pairs(Ints a, Ints b) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#endif
}

PREJIT_INLINE Floats load_some(const float* from, int64_t count) {
  return count >= kLanes ? load(from) : count > 0 ? load_first(from, count) : Floats{};
}

// In each four: 0 2 1 3, as weights are widened.
PREJIT_INLINE Ints in_order_of_pairs(Ints v) {
  constexpr int kOrder = _MM_SHUFFLE(3, 1, 2, 0);
  Floats bits = reinterpret_cast<Floats>(v);
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_shuffle_ps(bits, bits, kOrder));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_shuffle_ps(bits, bits, kOrder));
#else
  return reinterpret_cast<Ints>(_mm_shuffle_ps(bits, bits, kOrder));
#endif
}

// Stores digits of a row as bytes, which only CPUs with VNNI multiply, or as 16 bits.
PREJIT_INLINE void store_digits(Ints q, int64_t k, bool are_bytes, char* to) {
  using Shorts = VectorOf<int16_t, kLanes>::type;
  if (are_bytes) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + k), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(q)));
#elif defined(__AVX2__)
    __m128i shorts = reinterpret_cast<__m128i>(__builtin_convertvector(q, Shorts));
    _mm_storeu_si64(to + k, _mm_packs_epi16(shorts, shorts));
#endif
    return;
  }
  Shorts shorts = __builtin_convertvector(in_order_of_pairs(q), Shorts);
  memcpy(to + 2 * k, &shorts, sizeof shorts);
}

// A row of digits: y += factor * ((digits + zero) . weights). `begin` is where its sums begin for any output.
struct Digits {
  float factor;
  int32_t begin, zero;
};

// Some rows of x as digits, behind them second digits of some of them. Memory has room for all.
struct RowBlock {
  int64_t rows, count;  // Rows of x; and rows of digits.
  Digits digits[2 * kBlockRows];
  int64_t second[kBlockRows];  // The row of the second digits of a row, or 0.
};

PREJIT_INLINE int64_t total(Ints v) {
  int64_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// Rounds a row to `to`, and returns whether it needs second digits. A row that is not finite gets a factor that is NaN.
bool round_row(const float* x, int64_t inputs, bool are_bytes, char* to, Digits& digits, float& inverse) {
  Floats low = {}, high = {};
  Ints size = {};
  for (int64_t k = 0; k < inputs; k += kLanes) {
    Floats v = load_some(x + k, inputs - k);
    Ints bits = reinterpret_cast<Ints>(v) & 0x7FFFFFFF;  // in the order of sizes, and above all of them infinity and NaN
    size = bits > size ? bits : size;
    low = v < low ? v : low, high = v > high ? v : high;
  }
  float least_x = 0, largest_x = 0;
  bool is_finite = true;
  for (int i = 0; i < kLanes; ++i) {
    is_finite = is_finite && size[i] < 0x7F800000;
    least_x = low[i] < least_x ? low[i] : least_x, largest_x = high[i] > largest_x ? high[i] : largest_x;
  }
  float half = largest_x / 2 - least_x / 2;  // The whole range may not be finite.
  bool is_small = half < kLeastRange / 2;
  if (is_small) half = kLeastRange / 2;
  inverse = kSteps / 2 / half;
  int32_t zero = is_finite ? 127 + nearest(splat(least_x * inverse))[0] : 0;
  Ints sum = {}, sizes = {};
  for (int64_t k = 0; k < inputs; k += kLanes) {
    Ints steps = is_finite ? nearest(load_some(x + k, inputs - k) * inverse) : Ints{}, q = steps - zero;
    sum = sum + q, sizes = sizes + (steps < 0 ? -steps : steps);
    store_digits(q, k, are_bytes, to);
  }
  digits = {is_finite ? half / (kSteps / 2) : __builtin_nanf(""), are_bytes ? static_cast<int32_t>(-128 * total(sum)) : 0, zero};
  return is_finite && !is_small && total(sizes) < kFewSteps * inputs;
}

void round_rest(const float* x, int64_t inputs, bool are_bytes, char* to, const Digits& of, float inverse, Digits& digits) {
  Ints sum = {};
  for (int64_t k = 0; k < inputs; k += kLanes) {
    Floats v = load_some(x + k, inputs - k) * inverse;
    Ints q = nearest((v - to_floats(nearest(v))) * kDigit);
    sum = sum + q;
    store_digits(q, k, are_bytes, to);
  }
  digits = {of.factor / kDigit, are_bytes ? static_cast<int32_t>(-128 * total(sum)) : 0, 0};
}

// The steps of a strip, of 32 bits of each output. Rows of digits have whole vectors.
int64_t steps_of(int64_t inputs, bool are_bytes) { return parts_of(inputs, kLanes) * (kLanes / kStep) * (are_bytes ? 1 : 2); }

// The bytes of weights as they are, in 16 bits each.
struct Pairs {
  Ints even, odd;
};
PREJIT_INLINE Pairs pairs_of(Ints bytes) {
  using Shorts = VectorOf<int16_t, 2 * kLanes>::type;
  Shorts w = reinterpret_cast<Shorts>(bytes);
  return {reinterpret_cast<Ints>(w << 8 >> 8), reinterpret_cast<Ints>(w >> 8)};
}

#if defined(PREJIT_HAS_VNNI)
// Adds up the weights of each output of a strip, which has 128 more of each.
__attribute__((target(PREJIT_VNNI), noinline)) void sum_bytes(const int32_t* strip, int64_t steps, Ints (&sums)[kVectors]) {
  for (int v = 0; v < kVectors; ++v) sums[v] = Ints{} - static_cast<int32_t>(128 * kStep * steps);
  for (int64_t k = 0; k < steps; ++k, strip += kStripOutputs)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      sums[v] = add_dots(sums[v], load_as<Ints>(strip + v * kLanes), Ints{} + 0x01010101);
}
#endif

// Copies outputs [0, outputs) of W to a strip, and zeros for the rest of it. Behind it are the sums of outputs.
void copy_strip(const int8_t* w, int64_t outputs, int64_t inputs, bool are_bytes, int32_t* strip) {
  Ints sums[kVectors] = {};
  // Few bytes of an output at a time are too short for the CPU to see what follows.
  for (int64_t at = 0; at < outputs * inputs; at += 64) __builtin_prefetch(w + at, 0, 2);
  for (int64_t k = 0; k < inputs; k += kAtOnce)
    for (int vector = 0; vector < kVectors; ++vector) {
      Floats v[kLanes];
      const int8_t* from = w + vector * kLanes * inputs + k;
      int64_t count = outputs - vector * kLanes, bytes = least(inputs - k, kAtOnce);
      if (count >= kLanes && bytes == kAtOnce) {
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = load_as<Floats>(from + i * inputs);
      } else {
        int8_t some[kLanes][kAtOnce] = {};
        for (int i = 0; i < least(count, kLanes); ++i) memcpy(some[i], from + i * inputs, bytes);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) v[i] = load_as<Floats>(some[i]);
      }
      transpose(v);
      int64_t fours = least(steps_of(inputs - k, true), kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        if (i >= fours) break;
        Ints bytes = reinterpret_cast<Ints>(v[i]);
        int32_t* to = strip + (k / kStep + i) * (are_bytes ? 1 : 2) * kStripOutputs + vector * kLanes;
        if (are_bytes) {
          bytes = bytes ^ static_cast<int32_t>(0x80808080);
          memcpy(to, &bytes, sizeof bytes);
          continue;
        }
        Pairs pairs = pairs_of(bytes);
        sums[vector] = sums[vector] + dots_of_pairs(pairs.even, Ints{} + 0x10001) + dots_of_pairs(pairs.odd, Ints{} + 0x10001);
        memcpy(to, &pairs.even, sizeof pairs.even);
        memcpy(to + kStripOutputs, &pairs.odd, sizeof pairs.odd);
      }
    }
#if defined(PREJIT_HAS_VNNI)
  if (are_bytes) sum_bytes(strip, steps_of(inputs, true), sums);
#endif
  memcpy(strip + steps_of(inputs, are_bytes) * kStripOutputs, sums, sizeof sums);
}

// Some rows of digits times a strip.
struct Tile {
  const char* x;
  int64_t stride;  // Bytes from one row to the next.
  const int32_t* strip;
  int64_t steps;
  const Digits* digits;
  float* sums;  // [rows, kStripOutputs]
};

template <int rows>
PREJIT_INLINE void begin(const Tile& t, Ints (&sums)[rows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Ints of_weights = load_as<Ints>(t.strip + t.steps * kStripOutputs + v * kLanes);
      sums[r][v] = of_weights * t.digits[r].zero + t.digits[r].begin;
    }
}

template <int rows>
PREJIT_INLINE void end(const Tile& t, const Ints (&sums)[rows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      store(t.sums + r * kStripOutputs + v * kLanes, to_floats(sums[r][v]) * t.digits[r].factor);
}

#if defined(PREJIT_HAS_VNNI)
template <int rows>
__attribute__((target(PREJIT_VNNI), noinline)) void multiply_bytes(const Tile& t) {
  Ints sums[rows][kVectors];
  begin<rows>(t, sums);
  const int32_t* strip = t.strip;
  for (int64_t k = 0; k < t.steps; ++k, strip += kStripOutputs) {
    Ints w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load_as<Ints>(strip + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      Ints x = Ints{} + load_as<int32_t>(t.x + r * t.stride + k * kStep);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = add_dots(sums[r][v], w[v], x);
    }
  }
  end<rows>(t, sums);
}
#endif

template <int rows>
__attribute__((noinline)) void multiply_pairs(const Tile& t) {
  Ints sums[rows][kVectors];
  begin<rows>(t, sums);
  const int32_t* strip = t.strip;
  for (int64_t k = 0; k < t.steps; ++k, strip += kStripOutputs) {
    Ints w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = load_as<Ints>(strip + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      Ints x = Ints{} + load_as<int32_t>(t.x + r * t.stride + k * kStep);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = sums[r][v] + dots_of_pairs(w[v], x);
    }
  }
  end<rows>(t, sums);
}

template <int rows>
void multiply(const Tile& t, bool are_bytes) {
#if defined(PREJIT_HAS_VNNI)
  if (are_bytes) return multiply_bytes<rows>(t);
#endif
  static_cast<void>(are_bytes);
  multiply_pairs<rows>(t);
}

void multiply(const Tile& t, int64_t rows, bool are_bytes) {
  switch (rows) {
    case 1: return multiply<1>(t, are_bytes);
    case 2: return multiply<2>(t, are_bytes);
    case 3: return multiply<3>(t, are_bytes);
    case 4: return multiply<kTileRows < 6 ? kTileRows : 4>(t, are_bytes);
    case 5: return multiply<kTileRows < 6 ? kTileRows : 5>(t, are_bytes);
    default: return multiply<kTileRows>(t, are_bytes);
  }
}

// Rows of x as digits, in blocks.
struct PackedRows {
  int64_t first, rows;
  int64_t block_rows;
  int64_t stride;
  bool are_bytes;
  RowBlock* blocks;
  char* data;

  int64_t count() const { return parts_of(rows, block_rows); }
  char* of_block(int64_t block) const { return data + block * 2 * block_rows * stride; }
};

void round_block(const Linear& p, const PackedRows& x, int64_t index) {
  RowBlock& block = x.blocks[index];
  int64_t first = index * x.block_rows;
  block.rows = block.count = least(x.rows - first, x.block_rows);
  char* to = x.of_block(index);
  for (int64_t r = 0; r < block.rows; ++r) {
    const float* from = p.x + (x.first + first + r) * p.inputs;
    float inverse;
    block.second[r] = 0;
    if (!round_row(from, p.inputs, x.are_bytes, to + r * x.stride, block.digits[r], inverse)) continue;
    int64_t at = block.second[r] = block.count++;
    round_rest(from, p.inputs, x.are_bytes, to + at * x.stride, block.digits[r], inverse, block.digits[at]);
  }
}

// sums = the products of a block with a strip.
void multiply_block(const PackedRows& x, int64_t index, const int32_t* strip, int64_t steps, float* sums) {
  const RowBlock& block = x.blocks[index];
  for (int64_t r = 0; r < block.count; r += kTileRows) {
    Tile tile = {x.of_block(index) + r * x.stride, x.stride, strip, steps, block.digits + r, sums + r * kStripOutputs};
    multiply(tile, least(block.count - r, kTileRows), x.are_bytes);
  }
  for (int64_t r = 0; r < block.rows; ++r)
    if (int64_t at = block.second[r])
      for (int64_t i = 0; i < kStripOutputs; ++i) sums[r * kStripOutputs + i] += sums[at * kStripOutputs + i];
}

bool multiply_all(const Linear& p, const PackedRows& x) {
  int64_t strips = parts_of(p.outputs, kStripOutputs), steps = steps_of(p.inputs, x.are_bytes);
  // Each thread has some blocks to share, of rows that are worth another copy of their strip.
  int64_t splits = least(parts_of(x.rows, 2 * kBlockRows), parts_of(4 * threads(), strips));
  int64_t strip_size = (steps + 1) * kStripOutputs, sums_size = 2 * kBlockRows * kStripOutputs;
  std::atomic<bool> has_memory{true};
  parallel_for(strips * splits, [&](int64_t task) {
    int64_t split = task / strips, first = task % strips * kStripOutputs, count = least(p.outputs - first, kStripOutputs);
    int32_t* strip = static_cast<int32_t*>(scratch((p.gated ? 2 : 1) * (strip_size + sums_size) * sizeof(float), 1));
    if (!strip) return has_memory.store(false, std::memory_order_relaxed);
    int32_t* up = strip + strip_size;
    float *sums = reinterpret_cast<float*>(p.gated ? up + strip_size : up), *up_sums = sums + sums_size;
    auto copy = [&](const Weights& weights, int32_t* to) {
      copy_strip(static_cast<const int8_t*>(weights.data) + first * p.inputs, count, p.inputs, x.are_bytes, to);
    };
    copy(p.weights, strip);
    if (p.gated) copy(p.up, up);
    for (int64_t index = x.count() * split / splits; index < x.count() * (split + 1) / splits; ++index) {
      multiply_block(x, index, strip, steps, sums);
      if (p.gated) multiply_block(x, index, up, steps, up_sums);
      for (int64_t r = 0; r < x.blocks[index].rows; ++r)
        finish(p, sums + r * kStripOutputs, up_sums + r * kStripOutputs, x.first + index * x.block_rows + r, first, count);
    }
  });
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace

bool linear_by_integers(const Linear& p) {
  bool has_rows = p.weights.dtype == Dtype::kInt8 && p.rows != 0 && p.outputs != 0;
  if (!has_rows || p.inputs > kMostInputs || multiplier() == Multiplier::kAmx) return linear(p);
  bool are_bytes = vnni();
  int64_t stride = parts_of(p.inputs, kAtOnce) * kAtOnce * (are_bytes ? 1 : 2) + kApart;
  int64_t at_once = least(p.rows, least(parts_of(kRowBytes, stride), kMostRowsAtOnce));
  // Whole tiles, and where rows are few a block for each thread.
  int64_t block_rows = least(kBlockRows, parts_of(parts_of(at_once, threads()), kTileRows) * kTileRows);
  int64_t blocks = parts_of(at_once, block_rows);
  at_once = blocks * block_rows;
  char* memory = static_cast<char*>(scratch(blocks * (sizeof(RowBlock) + 2 * block_rows * stride)));
  if (!memory) return false;
  for (int64_t row = 0; row < p.rows; row += at_once) {
    PackedRows x = {row, least(p.rows - row, at_once), block_rows, stride, are_bytes,
                    reinterpret_cast<RowBlock*>(memory), memory + blocks * sizeof(RowBlock)};
    parallel_for(x.count(), [&](int64_t block) { round_block(p, x, block); });
    if (!multiply_all(p, x)) return false;
  }
  return true;
}

}  // namespace prejit
