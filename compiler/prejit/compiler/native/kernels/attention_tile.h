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

namespace prejit::attention {

constexpr int64_t kRows = 128;   // maximum rows of a tile
constexpr int64_t kBlock = 48;   // rows of a tile whose scores fit the first-level cache
constexpr int64_t kChunk = 64;   // keys that fit it
constexpr int64_t kUnit = 256;   // minimum keys that one thread sums
constexpr int64_t kFewRows = 8;  // maximum rows that share keys for which these are not transposed

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
  bool few;       // keys are not transposed
  bool rounds;    // all factors are rounded to bfloat16; not `few`, unless keys and values are stored so
  bool pairs;     // in the arrays below an element is a pair of them along the sums (attention_pairs.h)
  float cap;      // of scores; 0: none
  float* query;   // [R, P], scaled, zeros behind H
  float* scores;  // [kBlock, kChunk], or [1, kUnit]
  float* keys;    // [P, kChunk] transposed, or [kChunk, P]
  float* values;  // [kChunk, P]
  Sums sums, unit;
  Range ranges[kRows];  // rising with the rows

  static int64_t floats(int64_t rows, int64_t size) {
    return rows * round_up(size) + kBlock * kChunk + 2 * kUnit * round_up(size) + 2 * Sums::floats(rows, size);
  }

  void place(float* memory, int64_t most_rows, int64_t size) {
    query = memory;
    scores = query + most_rows * round_up(size);
    keys = scores + kBlock * kChunk;
    values = keys + kUnit * round_up(size);
    float* after = values + kUnit * round_up(size);
    sums = Sums::at(after, most_rows, size);
    unit = Sums::at(after + Sums::floats(most_rows, size), most_rows, size);
  }
};

// Returns some elements of a row as float32.
template <typename E>
PREJIT_INLINE Floats widened(const E* row, int64_t h, int64_t size, float factor, bool rounds) {
  const Floats some = (h + kLanes <= size ? load(row + h) : load_first(row + h, size - h)) * factor;
  return sizeof(E) == sizeof(float) && rounds ? rounded(some) : some;
}

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

// Fetches a row of a later chunk. Between the copies of two chunks lies arithmetic, so the processor's own prefetching
// begins anew with each chunk: with this, 8,192 positions of 8 heads of int8 take 0.36 ms, without it 0.84.
template <typename E>
PREJIT_INLINE void fetch(const E* row, int64_t elements) {
  for (int64_t h = 0; h < elements; h += 64 / sizeof(E)) __builtin_prefetch(row + h);
}

// Copies rows as float32 [count, P], zeros behind H.
template <typename E>
static void copy_rows(const E* from, int64_t stride, int64_t count, int64_t size, bool rounds, float* to) {
  for (int64_t s = 0; s < count; ++s, from += stride, to += round_up(size)) {
    fetch(from + kChunk * stride, size + kTail<E>);
    const float factor = factor_of(from, size);
    for (int64_t h = 0; h < size; h += kLanes) store(to + h, widened(from, h, size, factor, rounds));
  }
}

// Copies rows as columns: float32 [P, kChunk], zeros behind the last column up to a whole vector.
template <typename E>
static void copy_transposed(const E* from, int64_t stride, int64_t count, int64_t size, bool rounds, float* to) {
  for (int64_t s = 0; s < count; s += kLanes) {
    for (int64_t h = 0; h < size; h += kLanes) {
      Floats square[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        if (s + i >= count) {
          square[i] = Floats{};
          continue;
        }
        const E* row = from + (s + i) * stride;
        square[i] = widened(row, h, size, factor_of(row, size), rounds);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(to + (h + i) * kChunk + s, square[i]);
    }
  }
}

// scores[s] = query . keys[s] for kLanes keys, rows of P elements. If there are fewer keys, the last one is repeated.
// Fixed is P as a constant, or 0: with a constant the compiler needs no registers, which are scarce, for addresses.
template <int64_t Fixed, bool Whole, typename E>
PREJIT_INLINE void dots_block(const float* query, const E* keys, int64_t count, int64_t padded, float* scores) {
  const int64_t length = Fixed ? Fixed : padded;
  Floats total[kLanes] = {};
  for (int64_t h = 0; h < length; h += kLanes) {
    const Floats part = load(query + h);
    for (int i = 0; i < kLanes; ++i) {
      total[i] += part * load(keys + (Whole ? i : smaller(i, count - 1)) * length + h);
    }
  }
  store(scores, sums(total));
}

// Does the same for `count` keys. Scores are written up to a whole vector.
template <int64_t Fixed, typename E>
static void dots(const float* query, const E* keys, int64_t count, int64_t padded, float* scores) {
  int64_t s = 0;
  for (; s + kLanes <= count; s += kLanes) {
    dots_block<Fixed, true>(query, keys + s * padded, kLanes, padded, scores + s);
  }
  if (s < count) dots_block<Fixed, false>(query, keys + s * padded, count - s, padded, scores + s);
}

template <typename E>
static void dots_of_size(const float* query, const E* keys, int64_t count, int64_t padded, float* scores) {
  if (padded == 64) return dots<64>(query, keys, count, padded, scores);
  if (padded == 128) return dots<128>(query, keys, count, padded, scores);
  dots<0>(query, keys, count, padded, scores);
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
      for (int64_t s = 0; i < count && s < columns; s += kLanes) most[i] = larger(load(line + s), most[i]);
    }
    const Floats before = load(sums.most + row);
    const Floats top = larger(maxima(most), before);
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
    const Floats top = larger(theirs, ours);
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

// Keys and values of a chunk, ready to be multiplied. Keys: [count, P], or transposed [P, kChunk].
template <typename E>
struct Chunk {
  int64_t start, count;
  const E* keys;
  const E* values;
  int64_t value_stride;
};

// Adds a chunk to the sums of the rows from `first` to `last` - 1, at most kBlock.
template <typename E>
static void add_block(const Tile& tile, const Chunk<E>& chunk, int64_t size, int64_t first, int64_t last,
                      const Sums& sums) {
  const int64_t padded = round_up(size), rows = last - first;
  // The last row sees the most keys: keys that no row sees are not computed.
  const int64_t count = smaller(chunk.count, tile.ranges[last - 1].end - chunk.start);
  const int64_t columns = round_up(count), stride = rows == 1 ? kUnit : kChunk;
  const float* query = tile.query + first * padded;
  if (tile.few) {
    for (int64_t r = 0; r < rows; ++r) {
      dots_of_size(query + r * padded, chunk.keys, count, padded, tile.scores + r * stride);
    }
  } else if (tile.pairs) {
    multiply_pairs({(size + 1) / 2, query, padded, tile.keys, kChunk, tile.scores, stride, false}, rows, columns);
  } else {
    multiply(Product<E>{size, query, padded, chunk.keys, kChunk, tile.scores, stride, false}, rows, columns);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* scores = tile.scores + r * stride;
    if (tile.cap > 0) cap_scores(scores, columns, tile.cap);
    hide(scores, columns, tile.ranges[first + r], chunk.start, count);
  }
  auto soften_rows = tile.rounds ? soften<true> : soften<false>;
  soften_rows(tile.scores, stride, columns, sums, first, rows, padded);
  float* mixed = sums.mixed + first * padded;
  if (tile.pairs) {
    for (int64_t r = 0; r < rows; ++r) pack_pairs(tile.scores + r * stride, columns);
    const Product<float> product = {(count + 1) / 2, tile.scores, stride, tile.values, padded, mixed, padded, true};
    return multiply_pairs(product, rows, padded);
  }
  multiply(Product<E>{count, tile.scores, stride, chunk.values, chunk.value_stride, mixed, padded, true}, rows,
           padded);
}

// Adds a chunk to the sums of the rows that see any of it.
template <typename E>
static void add_rows(const Tile& tile, const Chunk<E>& chunk, int64_t size, const Sums& sums) {
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

// Adds the keys `start` to `end` - 1 to the sums of all rows.
template <typename E>
static void add_chunk(const Head<E>& head, const Tile& tile, int64_t start, int64_t end, const Sums& sums) {
  const int64_t size = head.size, padded = round_up(size), count = end - start;
  const E* keys = head.keys + start * head.stride;
  const E* values = head.values + start * head.stride;
  if constexpr (!kTail<E>) {
    if (tile.pairs) {
      copy_pairs_transposed(keys, head.stride, count, size, kChunk, tile.keys);
      copy_paired_rows(values, head.stride, count, size, tile.values);
      return add_rows(tile, Chunk<float>{start, count, tile.keys, tile.values, padded}, size, sums);
    }
  }
  // Rows of whole vectors are used in place. bfloat16 is so for one row only, or each row would widen it again.
  const bool fits = sizeof(E) == sizeof(float) ? !tile.rounds : tile.rows == 1;
  const bool in_place = size == padded && !kTail<E> && fits;
  if (tile.few && in_place && head.stride == padded) {
    // Values come from memory while keys are multiplied: 8 rows of 12 heads wait an eighth less.
    for (int64_t s = 0; s < smaller(count, kChunk); ++s) fetch(values + s * padded, size);
    return add_rows(tile, Chunk<E>{start, count, keys, values, padded}, size, sums);
  }
  if (tile.few) {
    copy_rows(keys, head.stride, count, size, tile.rounds, tile.keys);
  } else {
    copy_transposed(keys, head.stride, count, size, tile.rounds, tile.keys);
  }
  if constexpr (sizeof(E) == sizeof(float)) {
    if (in_place) {
      return add_rows(tile, Chunk<float>{start, count, tile.keys, values, head.stride}, size, sums);
    }
  }
  copy_rows(values, head.stride, count, size, tile.rounds, tile.values);
  add_rows(tile, Chunk<float>{start, count, tile.keys, tile.values, padded}, size, sums);
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
  const int64_t step = tile.rows == 1 && tile.few && !kTail<E> ? kUnit : kChunk;
  sums.clear(tile.rows, head.size);
  for (int64_t s = first; s < end; s += step) {
    const int64_t next = smaller(s + step, end);
    // Chunks begin at fixed positions, so that the result of a row does not depend on the other rows of its tile; few
    // rows are always one tile.
    const int64_t from = tile.few ? larger(s, reached.first) : s;
    if (next > from && next > reached.first) add_chunk(head, tile, from, next, sums);
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
