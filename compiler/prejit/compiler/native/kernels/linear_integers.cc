// Lanes are outputs. A strip of W is copied so that a vector has 4 inputs of each of its outputs, and is multiplied with
// all rows while it is in L1 or L2; a tile has few rows and the outputs of a strip, whose sums are in registers:
//
//   W [64 outputs, K] -> [K / 4][64][4]     then rows 0 .. 5, 6 .. 11, ...: x[row, 4 k .. 4 k + 3] is one broadcast
//
// Few rows read W in place instead (linear_digit_dots.h).
//
// The instruction multiplies bytes without a sign by bytes with one, so 128 is added to weights. In the end what that added is
// taken from a sum, and the zero of the row times the sum of the output's weights is added. Without that instruction x and the
// strip are widened to 16 bits, and 2 inputs are multiplied at a time: to widen a strip for each tile again cost a fifth of the
// time (AVX2).
#include "linear_integers.h"

#include <atomic>

#include "linear_amx.h"
#include "linear_digit_dots.h"
#include "linear_finish.h"
#include "transpose.h"

namespace prejit {
namespace {

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

// Some rows of x as digits: the first ones of each row, then the second ones of some.
struct RowBlock {
  int64_t rows, count;  // Rows of x; and of digits that are multiplied.
  Digits digits[kMostDotRows];
  int64_t second[kMostDotRows];  // Where the sums of the second digits of a row are, or 0.
};
static_assert(kBlockRows <= kMostDotRows);

// Sums of a row of x from those of its digits.
PREJIT_INLINE Floats row_sums(const RowBlock& block, int64_t row, bool are_bytes, Ints first, Ints second, Ints of_weights) {
  const Digits& digits = block.digits[row];
  int32_t added = are_bytes ? -128 : 0;
  first = first + added * digits.sums[0] + of_weights * digits.zero;
  return fixed_sum(first, second + added * digits.sums[1], splat(digits.factor));
}

// The steps of a strip, of 32 bits of each output. Rows of digits have whole vectors.
int64_t steps_of(int64_t inputs, bool are_bytes) { return parts_of(inputs, kLanes) * (kLanes / kStep) * (are_bytes ? 1 : 2); }

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
        sums[vector] = sums[vector] + sums_of_pairs(pairs);
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
  int32_t* sums;  // [rows, kStripOutputs]
};

template <int rows>
PREJIT_INLINE void end(const Tile& t, const Ints (&sums)[rows][kVectors]) {
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) memcpy(t.sums + r * kStripOutputs + v * kLanes, &sums[r][v], sizeof sums[r][v]);
}

#if defined(PREJIT_HAS_VNNI)
template <int rows>
__attribute__((target(PREJIT_VNNI), noinline)) void multiply_bytes(const Tile& t) {
  Ints sums[rows][kVectors] = {};
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
  Ints sums[rows][kVectors] = {};
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
  bool are_bytes, is_wide;
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
    block.digits[r] = round_row(from, p.inputs, x.is_wide, x.are_bytes ? Store::kBytes : Store::kPairs, to + r * x.stride,
                                to + block.count * x.stride);
    if (x.are_bytes)
      block.second[r] = block.digits[r].has_second ? block.count++ : 0;
    else
      block.second[r] = block.rows + r;
  }
}

// Some steps of a strip, of each of its outputs.
struct Strip {
  const int32_t* data;
  int64_t first, steps;
};

// sums = the products of the digits of a block with a strip.
void multiply_digits(const PackedRows& x, int64_t index, const Strip& strip, int32_t* sums) {
  const RowBlock& block = x.blocks[index];
  const char* from = x.of_block(index) + strip.first * kStep;
  for (int64_t r = 0; r < block.count; r += kTileRows) {
    Tile tile = {from + r * x.stride, x.stride, strip.data + strip.first * kStripOutputs, strip.steps,
                 sums + r * kStripOutputs};
    multiply(tile, least(block.count - r, kTileRows), x.are_bytes);
  }
}

// The same for shorts, few of whose products fit 32 bits.
void multiply_shorts(const PackedRows& x, int64_t index, const Strip& strip, int32_t* some, int32_t* sums) {
  int64_t count = x.blocks[index].rows * kStripOutputs;
  int32_t *highs = sums, *lows = sums + count;
  memset(sums, 0, 2 * count * sizeof *sums);
  for (int64_t first = 0; first < strip.steps; first += kShortsAtOnce) {
    multiply_digits(x, index, {strip.data, first, least(strip.steps - first, kShortsAtOnce)}, some);
    for (int64_t i = 0; i < count; ++i) highs[i] += some[i] >> kLowBits, lows[i] += some[i] & kLowMask;
  }
}

// Memory of a thread for a strip and its sums.
struct Memory {
  int32_t* strip;
  int32_t* digits;  // The sums of digits.
  float* sums;
};

void multiply_block(const PackedRows& x, int64_t index, int64_t steps, const Memory& memory) {
  const RowBlock& block = x.blocks[index];
  Strip strip = {memory.strip, 0, steps};
  if (x.are_bytes)
    multiply_digits(x, index, strip, memory.digits);
  else
    multiply_shorts(x, index, strip, reinterpret_cast<int32_t*>(memory.sums), memory.digits);
  for (int64_t r = 0; r < block.rows; ++r)
    for (int64_t i = 0; i < kStripOutputs; i += kLanes) {
      Ints of_first = load_as<Ints>(memory.digits + r * kStripOutputs + i), of_second = {};
      if (block.second[r]) of_second = load_as<Ints>(memory.digits + block.second[r] * kStripOutputs + i);
      Ints of_weights = load_as<Ints>(memory.strip + steps * kStripOutputs + i);
      store(memory.sums + r * kStripOutputs + i, row_sums(block, r, x.are_bytes, of_first, of_second, of_weights));
    }
}

bool multiply_all(const Linear& p, const PackedRows& x) {
  int64_t strips = parts_of(p.outputs, kStripOutputs), steps = steps_of(p.inputs, x.are_bytes);
  // Each thread has some blocks to share, of rows that are worth another copy of their strip.
  int64_t splits = least(parts_of(x.rows, 2 * kBlockRows), parts_of(4 * threads(), strips));
  int64_t strip_size = (steps + 1) * kStripOutputs, sums_size = kBlockRows * kStripOutputs;
  int64_t size = strip_size + 3 * sums_size;
  std::atomic<bool> has_memory{true};
  parallel_for(strips * splits, [&](int64_t task) {
    int64_t split = task / strips, first = task % strips * kStripOutputs, count = least(p.outputs - first, kStripOutputs);
    int32_t* all = static_cast<int32_t*>(scratch((p.gated ? 2 : 1) * size * sizeof(float), 1));
    if (!all) return has_memory.store(false, std::memory_order_relaxed);
    auto prepared = [&](const Weights& weights, int32_t* to) {
      copy_strip(static_cast<const int8_t*>(weights.data) + first * p.inputs, count, p.inputs, x.are_bytes, to);
      return Memory{to, to + strip_size, reinterpret_cast<float*>(to + strip_size + 2 * sums_size)};
    };
    const Memory memory = prepared(p.weights, all), up = p.gated ? prepared(p.up, all + size) : memory;
    for (int64_t index = x.count() * split / splits; index < x.count() * (split + 1) / splits; ++index) {
      multiply_block(x, index, steps, memory);
      if (p.gated) multiply_block(x, index, steps, up);
      for (int64_t r = 0; r < x.blocks[index].rows; ++r)
        finish(p, memory.sums + r * kStripOutputs, up.sums + r * kStripOutputs, x.first + index * x.block_rows + r, first,
               count);
    }
  });
  return has_memory.load(std::memory_order_relaxed);
}

bool linear_by_strips(const Linear& p, bool is_wide) {
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
    PackedRows x = {row, least(p.rows - row, at_once), block_rows, stride, are_bytes, is_wide,
                    reinterpret_cast<RowBlock*>(memory), memory + blocks * sizeof(RowBlock)};
    parallel_for(x.count(), [&](int64_t block) { round_block(p, x, block); });
    if (!multiply_all(p, x)) return false;
  }
  return true;
}

// Puts the rows of digits that are multiplied behind each other. After the first digits comes a row of ones if any row has a
// zero, because its sums are those of weights; then come the second digits, which row r has at `unplaced` + r. Returns the
// index of the row of ones, or 0.
template <typename Dots>
int64_t place_digits(RowBlock& block, int64_t unplaced, char* x, int64_t stride) {
  bool has_zeros = false;
  for (int64_t r = 0; r < block.rows; ++r) has_zeros = has_zeros || block.digits[r].zero != 0;
  int64_t ones = has_zeros ? block.count++ : 0;
  for (int64_t r = 0; r < block.rows; ++r) {
    block.second[r] = Dots::kAreBytes ? 0 : kMostDotRows + r;
    if (!Dots::kAreBytes || !block.digits[r].has_second) continue;
    memmove(x + block.count * stride, x + (unplaced + r) * stride, stride);
    block.second[r] = block.count++;
  }
  if (has_zeros) {
    const int16_t one = 1;
    if (Dots::kAreBytes) memset(x + ones * stride, 1, stride);
    for (int64_t k = 0; k < stride && !Dots::kAreBytes; k += sizeof one) memcpy(x + ones * stride + k, &one, sizeof one);
  }
  return ones;
}

template <typename Dots>
bool linear_by_dots(const Linear& p, bool is_wide) {
  constexpr Store how = Dots::kAreBytes ? Store::kBytes : Store::kShorts;
  int64_t stride = inputs_of_vectors(p.inputs) * (Dots::kAreBytes ? 1 : 2), unplaced = p.rows + 1;
  char* memory = static_cast<char*>(scratch(sizeof(RowBlock) + (unplaced + p.rows) * stride));
  if (!memory) return false;
  RowBlock& block = *reinterpret_cast<RowBlock*>(memory);
  char* x = memory + sizeof(RowBlock);
  block.rows = block.count = p.rows;
  parallel_for(p.rows, [&](int64_t row) {
    block.digits[row] =
        round_row(p.x + row * p.inputs, p.inputs, is_wide, how, x + row * stride, x + (unplaced + row) * stride);
  });
  int64_t ones = place_digits<Dots>(block, unplaced, x, stride);
  int64_t size = dot_block_outputs(dot_streams_of<Dots>(block.count), p.inputs, p.outputs, threads(), kDotOutputs);
  std::atomic<bool> has_memory{true};
  parallel_for(parts_of(p.outputs, size), [&](int64_t index) {
    constexpr int64_t kSums = kMostDotRows * kDotOutputs;
    float* sums = static_cast<float*>(scratch(4 * kSums * sizeof(float), 1));
    if (!sums) return has_memory.store(false, std::memory_order_relaxed);
    float* up_sums = sums + kSums;
    int32_t* of_digits = reinterpret_cast<int32_t*>(sums + 2 * kSums);
    int64_t first = index * size, count = least(p.outputs - first, size);
    auto multiply = [&](const Weights& weights, float* to) {
      const int8_t* w = static_cast<const int8_t*>(weights.data) + first * p.inputs;
      dot_block<Dots>(x, block.count, stride, w, p.inputs, count, of_digits, kDotOutputs);
      // Lanes behind the last output are added up, too: what lay there before might overflow.
      int64_t rest = parts_of(count, kLanes) * kLanes - count, rows = block.count + (Dots::kAreBytes ? 0 : kMostDotRows);
      for (int64_t row = 0; row < rows && rest; ++row)
        memset(of_digits + row * kDotOutputs + count, 0, rest * sizeof *of_digits);
      auto of = [&](int64_t row, int64_t i) __attribute__((always_inline)) {
        return load_as<Ints>(of_digits + row * kDotOutputs + i);
      };
      for (int64_t i = 0; i < count; i += kLanes) {
        Ints of_weights = {};
        if (ones && Dots::kAreBytes) of_weights = of(ones, i) - static_cast<int32_t>(128 * stride);
        if (ones && !Dots::kAreBytes) of_weights = (of(ones, i) << kLowBits) + of(kMostDotRows + ones, i);
        for (int64_t r = 0; r < p.rows; ++r) {
          Ints second = block.second[r] ? of(block.second[r], i) : Ints{};
          store(to + r * kDotOutputs + i, row_sums(block, r, Dots::kAreBytes, of(r, i), second, of_weights));
        }
      }
    };
    multiply(p.weights, sums);
    if (p.gated) multiply(p.up, up_sums);
    for (int64_t r = 0; r < p.rows; ++r) finish(p, sums + r * kDotOutputs, up_sums + r * kDotOutputs, r, first, count);
  });
  return has_memory.load(std::memory_order_relaxed);
}

template <typename Dots>
bool multiply_rows(const Linear& p, bool is_wide) {
  return p.rows <= Dots::most_rows(p.inputs) ? linear_by_dots<Dots>(p, is_wide) : linear_by_strips(p, is_wide);
}

// Multiplies rows that are rounded to int8, or to 16 bits if `is_wide`.
bool multiply_digits(const Linear& p, bool is_wide) {
  if (p.rows >= kFewestTileRows && multiplier() == Multiplier::kAmx && byte_tiles()) return digits_by_amx(p, is_wide);
#if defined(PREJIT_HAS_VNNI)
  if (vnni()) return multiply_rows<ByteDots>(p, is_wide);
#endif
  return multiply_rows<ShortDots>(p, is_wide);
}

}  // namespace

bool linear_by_integers(const Linear& p) {
  if (p.weights.dtype != Dtype::kInt8 || p.rows == 0 || p.outputs == 0 || p.inputs > kMostIntegerInputs) return linear(p);
  return multiply_digits(p, false);
}

bool linear_by_fixed_point(const Linear& p) { return multiply_digits(p, true); }

}  // namespace prejit
