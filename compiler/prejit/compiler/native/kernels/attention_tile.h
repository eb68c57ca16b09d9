// Attention of a tile of query rows to a range of keys, without storing the whole matrix of scores.
//
// Softmax is online, as in Dao et al. 2022 (FlashAttention), arXiv 2205.14135, algorithm 1: with each chunk of keys
// the sums are rescaled to the largest score so far, rounded up to the logarithm of a power of two: rescaling is
// exact, and the digits of a weight do not depend on the chunks. Keys are summed in units at fixed positions, and
// units are merged in order, so a result depends neither on threads nor on the other rows of a batch.
//
// Where a tile rounds, queries, keys, values and weights are rounded to bfloat16, on every CPU.
//
// Shapes: R query rows, H head size, P = H rounded up to whole vectors.
#pragma once

#include "attention_pairs.h"
#include "threads.h"

namespace prejit::attention {

constexpr int64_t kRows = 128;  // maximum rows of a tile
constexpr int64_t kBlock = 48;  // rows of a tile whose scores fit the first-level cache
constexpr int64_t kUnit = 256;  // minimum keys that one thread sums

PREJIT_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
PREJIT_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

PREJIT_INLINE int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// The keys that a row sees: positions first to end - 1.
struct Range {
  int64_t first, end;
};

// The keys and values of one head: row s is `stride` elements behind row s - 1, and has a tail if E is int8_t.
template <typename E>
struct Head {
  const E* keys;
  const E* values;
  int64_t stride;
  int64_t size;
};

// The sums of rows: values weighted with exp(score - base) [R, P], weights [R, lanes], whose sum is the weight of a
// row, and the largest score [R], which gives the base.
struct Sums {
  float* mixed;
  float* weight;
  float* most;

  static int64_t floats(int64_t rows, int64_t size) {
    return rows * (round_up(size) + kLanes) + round_up(rows) + kLanes;
  }

  static Sums at(float* memory, int64_t rows, int64_t size) {
    float* weight = memory + rows * round_up(size);
    return {memory, weight, weight + rows * kLanes};
  }

  void clear(int64_t rows, int64_t size) const {
    std::memset(mixed, 0, sizeof(float) * rows * round_up(size));
    std::memset(weight, 0, sizeof(float) * rows * kLanes);
    // Whole vectors of `most` are read and written.
    for (int64_t r = 0; r < round_up(rows) + kLanes; ++r) most[r] = -__builtin_inff();
  }
};

// A tile of rows, and the memory that a thread needs for it.
struct Tile {
  int64_t rows;
  bool rounds;    // all factors are rounded to bfloat16
  bool pairs;     // in the arrays below an element is a pair of them along the sums (attention_pairs.h)
  float cap;      // of scores; 0: none
  float* query;   // [R, P], scaled, zeros behind H
  float* scores;  // [kBlock, kChunk]
  float* keys;    // [P, kChunk]: transposed
  float* values;  // [kChunk, P]
  Sums sums, unit;
  Range ranges[kRows];  // rising with the rows

  static int64_t floats(int64_t rows, int64_t size) {
    return rows * round_up(size) + kBlock * kChunk + 2 * kChunk * round_up(size) + 2 * Sums::floats(rows, size);
  }

  void place(float* memory, int64_t most_rows, int64_t size) {
    query = memory;
    scores = query + most_rows * round_up(size);
    keys = scores + kBlock * kChunk;
    values = keys + kChunk * round_up(size);
    float* after = values + kChunk * round_up(size);
    sums = Sums::at(after, most_rows, size);
    unit = Sums::at(after + Sums::floats(most_rows, size), most_rows, size);
  }
};

// Scales query row r into the workspace.
PREJIT_INLINE void place_query(const Tile& tile, int64_t r, const float* from, int64_t size, float scale) {
  const int64_t padded = round_up(size);
  float* to = tile.query + r * padded;
  for (int64_t h = 0; h < size; h += kLanes) {
    store(to + h, widened(from, h, size, scale, tile.rounds));
  }
  if (tile.pairs) pack_pairs(to, padded);
}

// Writes the result of a row: zeros if it saw no key.
PREJIT_INLINE void place_result(const Sums& sums, int64_t row, int64_t size, float* to) {
  const float weight = sum(load(sums.weight + row * kLanes));
  const float factor = weight == 0 ? 0 : 1 / weight;
  const float* mixed = sums.mixed + row * round_up(size);
  for (int64_t h = 0; h < size; ++h) to[h] = mixed[h] * factor;
}

// Copies rows as float32 [count, P], zeros behind H.
template <typename E>
static void copy_rows(const Rows<E>& rows, int64_t size, bool rounds, float* to) {
  const E* from = rows.first;
  for (int64_t s = 0; s < rows.count; ++s, from += rows.stride, to += round_up(size)) {
    rows.fetch_behind(s, size);
    const float factor = factor_of(from, size);
    for (int64_t h = 0; h < size; h += kLanes) store(to + h, widened(from, h, size, factor, rounds));
  }
}

// Copies rows as columns: float32 [P, kChunk], zeros behind the last column up to a whole vector.
template <typename E>
static void copy_transposed(const Rows<E>& rows, int64_t size, bool rounds, float* to) {
  for (int64_t s = 0; s < rows.count; s += kLanes) {
    for (int64_t h = 0; h < size; h += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        if (s + i >= rows.count) {
          square[i] = Floats{};
          continue;
        }
        const E* row = rows.first + (s + i) * rows.stride;
        if (h == 0) rows.fetch_behind(s + i, size);
        square[i] = widened(row, h, size, factor_of(row, size), rounds);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (h + i) * kChunk + s, square[i]);
    }
  }
}

PREJIT_INLINE void scale_row(float* row, int64_t padded, float factor) {
  for (int64_t h = 0; h < padded; h += kLanes) store(row + h, load(row + h) * factor);
}

// What is subtracted from the scores of rows: high + low = exponent * ln 2. The first has few bits, so that it is
// exact.
struct Base {
  Floats exponent, high, low;
};

// From here on a score's last bit is worth as much as rounding, and it is subtracted itself. Below, `high` is exact.
constexpr float kHuge = 0x1p14f;

PREJIT_INLINE auto is_huge(Floats score) { return (score >= splat(kHuge)) | (score <= splat(-kHuge)); }

// For a row that has seen no key the base is 0: exp(-inf - 0) = 0, but -inf - -inf would be NaN.
PREJIT_INLINE Base base_of(Floats most) {
  const Floats score = most == splat(-__builtin_inff()) ? Floats{} : most;
  const Floats exponent = ceiling(score * 1.44269504f);
  const auto huge = is_huge(score);
  return {exponent, huge ? score : exponent * 0.693359375f, huge ? Floats{} : exponent * -2.12194440e-4f};
}

// Returns the factor of sums whose largest score was `before` and is `top` now, the same or larger. It may be above 1
// if only `top` is huge.
PREJIT_INLINE Floats rescaling(Floats before, Floats top) {
  const Base from = base_of(before), to = base_of(top);
  const Floats high = before == splat(-__builtin_inff()) ? before : from.high;
  const Floats exponential = exp_negative(high - to.high + (from.low - to.low));
  return is_huge(before) | is_huge(top) ? exponential : power_of_two(from.exponent - to.exponent);
}

// Turns the scores of `rows` rows from `first` on into weights, and rescales the sums to the largest score.
template <bool Rounds>
static void soften(float* scores, int64_t stride, int64_t columns, const Sums& sums, int64_t first, int64_t rows,
                   int64_t padded) {
  for (int64_t done = 0; done < rows; done += kLanes) {
    const int64_t count = smaller(rows - done, kLanes), row = first + done;
    Floats most[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      most[i] = splat(-__builtin_inff());
      const float* line = scores + (done + i) * stride;
      for (int64_t s = 0; i < count && s < columns; s += kLanes) most[i] = maximum(load(line + s), most[i]);
    }
    const Floats before = load(sums.most + row);
    const Floats top = maximum(maxima(most), before);
    const Base base = base_of(top);
    float high[kLanes], low[kLanes], factors[kLanes];
    store(high, base.high);
    store(low, base.low);
    store(factors, rescaling(before, top));
    store(sums.most + row, top);
    for (int64_t i = 0; i < count; ++i) {
      float* line = scores + (done + i) * stride;
      Floats total = {};
      for (int64_t s = 0; s < columns; s += kLanes) {
        Floats weight = exp_negative(load(line + s) - high[i] - low[i]);
        if constexpr (Rounds) weight = rounded(weight);
        store(line + s, weight);
        total += weight;
      }
      float* weight = sums.weight + (row + i) * kLanes;
      store(weight, load(weight) * factors[i] + total);
      if (factors[i] != 1) scale_row(sums.mixed + (row + i) * padded, padded, factors[i]);
    }
  }
}

// Adds the sums of `other` to `sums`.
static void merge(const Sums& sums, const Sums& other, int64_t rows, int64_t size) {
  const int64_t padded = round_up(size);
  for (int64_t done = 0; done < rows; done += kLanes) {
    const Floats ours = load(sums.most + done), theirs = load(other.most + done);
    const Floats top = maximum(theirs, ours);
    float factors[kLanes], other_factors[kLanes];
    store(factors, rescaling(ours, top));
    store(other_factors, rescaling(theirs, top));
    store(sums.most + done, top);
    for (int64_t i = 0, count = smaller(rows - done, kLanes); i < count; ++i) {
      float* weight = sums.weight + (done + i) * kLanes;
      const float* more_weight = other.weight + (done + i) * kLanes;
      store(weight, load(weight) * factors[i] + load(more_weight) * other_factors[i]);
      float* mixed = sums.mixed + (done + i) * padded;
      const float* more = other.mixed + (done + i) * padded;
      for (int64_t h = 0; h < padded; h += kLanes) {
        store(mixed + h, load(mixed + h) * factors[i] + load(more + h) * other_factors[i]);
      }
    }
  }
}

// Applies the soft bound: cap * tanh(score / cap).
static void cap_scores(float* scores, int64_t columns, float cap) {
  for (int64_t s = 0; s < columns; s += kLanes) {
    store(scores + s, tanh(load(scores + s) / cap) * cap);
  }
}

// Writes minus infinity for the keys, `count` from `start` on, that a row does not see, and for columns without key.
PREJIT_INLINE void hide(float* scores, int64_t columns, Range range, int64_t start, int64_t count) {
  const int64_t first = range.first - start, end = range.end - start < count ? range.end - start : count;
  for (int64_t s = 0; s < first && s < columns; ++s) scores[s] = -__builtin_inff();
  for (int64_t s = end > 0 ? end : 0; s < columns; ++s) scores[s] = -__builtin_inff();
}

// Keys and values of a chunk, ready to be multiplied. Keys are transposed: [P, kChunk].
struct Chunk {
  int64_t start, count;
  const float* keys;
  const float* values;
  int64_t value_stride;
};

// Adds a chunk to the sums of the rows from `first` to `last` - 1, at most kBlock.
static void add_block(const Tile& tile, const Chunk& chunk, int64_t size, int64_t first, int64_t last,
                      const Sums& sums) {
  const int64_t padded = round_up(size), rows = last - first;
  // The last row sees the most keys: keys that no row sees are not computed.
  const int64_t count = smaller(chunk.count, tile.ranges[last - 1].end - chunk.start);
  const int64_t columns = round_up(count), in_element = tile.pairs ? 2 : 1;
  const float* query = tile.query + first * padded;
  auto multiply_all = tile.pairs ? multiply_pairs : multiply;
  multiply_all({parts_of(size, in_element), query, padded, chunk.keys, kChunk, tile.scores, kChunk, false}, rows, columns);
  for (int64_t r = 0; r < rows; ++r) {
    float* scores = tile.scores + r * kChunk;
    if (tile.cap > 0) cap_scores(scores, columns, tile.cap);
    hide(scores, columns, tile.ranges[first + r], chunk.start, count);
  }
  auto soften_rows = tile.rounds ? soften<true> : soften<false>;
  soften_rows(tile.scores, kChunk, columns, sums, first, rows, padded);
  for (int64_t r = 0; r < rows && tile.pairs; ++r) pack_pairs(tile.scores + r * kChunk, columns);
  // Keys before those that a row sees have weights of 0, but their values may be no numbers.
  const int64_t unseen = larger(0, tile.ranges[first].first - chunk.start) / in_element;
  const float* values = chunk.values + unseen * chunk.value_stride;
  const int64_t terms = parts_of(count, in_element) - unseen;
  float* mixed = sums.mixed + first * padded;
  multiply_all({terms, tile.scores + unseen, kChunk, values, chunk.value_stride, mixed, padded, true}, rows, padded);
}

// Adds a chunk to the sums of the rows that see any of it.
static void add_rows(const Tile& tile, const Chunk& chunk, int64_t size, const Sums& sums) {
  int64_t first = 0, last = tile.rows;
  while (first < last && tile.ranges[first].end <= chunk.start) ++first;
  while (first < last && tile.ranges[last - 1].first >= chunk.start + chunk.count) --last;
  while (first < last) {
    // Where the range of a row ends within the chunk, smaller blocks skip more keys.
    const bool whole = tile.ranges[first].end >= chunk.start + chunk.count;
    const int64_t next = smaller(first + (whole ? kBlock : kBlock / 2), last);
    add_block(tile, chunk, size, first, next, sums);
    first = next;
  }
}

// Adds the keys `start` to `end` - 1 to the sums of all rows, which see keys up to `last` - 1.
template <typename E>
static void add_chunk(const Head<E>& head, const Tile& tile, int64_t start, int64_t end, int64_t last, const Sums& sums) {
  const int64_t size = head.size, padded = round_up(size), count = end - start;
  const Rows<E> keys = {head.keys + start * head.stride, head.stride, count, last - end};
  const Rows<E> values = {head.values + start * head.stride, head.stride, count, last - end};
  Chunk chunk = {start, count, tile.keys, tile.values, padded};
  if constexpr (!kTail<E>) {
    if (tile.pairs) {
      copy_pairs_transposed(keys, size, kChunk, tile.keys);
      copy_paired_rows(values, size, tile.values);
      return add_rows(tile, chunk, size, sums);
    }
  }
  copy_transposed(keys, size, tile.rounds, tile.keys);
  if constexpr (sizeof(E) == sizeof(float)) {
    if (size == padded && !tile.rounds) {  // rows of whole vectors are used in place
      for (int64_t s = 0; s < count; ++s) values.fetch_behind(s, size);
      chunk.values = values.first, chunk.value_stride = head.stride;
      return add_rows(tile, chunk, size, sums);
    }
  }
  copy_rows(values, size, tile.rounds, tile.values);
  add_rows(tile, chunk, size, sums);
}

// Returns the positions that any of the rows sees.
PREJIT_INLINE Range reach(const Tile& tile) {
  return tile.rows > 0 ? Range{tile.ranges[0].first, tile.ranges[tile.rows - 1].end} : Range{0, 0};
}

// Computes the sums of the rows over one unit of keys, which may be out of their reach.
template <typename E>
static void add_unit(const Head<E>& head, const Tile& tile, int64_t unit, const Sums& sums) {
  const Range reached = reach(tile);
  const int64_t first = unit * kUnit, end = smaller(reached.end, first + kUnit);
  sums.clear(tile.rows, head.size);
  // Chunks begin at fixed positions, so that the result of a row does not depend on the other rows of its tile.
  for (int64_t s = first; s < end; s += kChunk) {
    const int64_t next = smaller(s + kChunk, end);
    if (next > reached.first) add_chunk(head, tile, s, next, reached.end, sums);
  }
}

// Computes the sums of the rows over all keys that they see, in tile.sums.
template <typename E>
static void attend(const Head<E>& head, const Tile& tile) {
  const Range reached = reach(tile);
  if (reached.first >= reached.end) return tile.sums.clear(tile.rows, head.size);
  const int64_t first = reached.first / kUnit, last = (reached.end - 1) / kUnit;
  add_unit(head, tile, first, tile.sums);
  for (int64_t unit = first + 1; unit <= last; ++unit) {
    add_unit(head, tile, unit, tile.unit);
    merge(tile.sums, tile.unit, tile.rows, head.size);
  }
}

// Returns the rows of a tile for `rows` rows that share keys: fewer than is best if more threads need work.
inline int64_t tile_rows(int64_t rows, int64_t heads, int threads) {
  int64_t most = smaller(rows, kRows);
  while (most > 32 && heads * ((rows + most - 1) / most) < 2 * threads) most = (most + 1) / 2;
  return most;
}

}  // namespace prejit::attention
