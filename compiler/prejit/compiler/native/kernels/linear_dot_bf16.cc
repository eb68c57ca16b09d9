// Lanes are inputs, as in linear_dot.h: x is rounded and stored row by row, and weights are read in place, once for all
// rows. A tile has few rows and outputs, whose sums are in registers. Among many rows the first tile keeps weights in L1
// for the tiles of the other rows:
//
//   rows 0 .. 3: from memory, kept     rows 4 .. 7, 8 .. 11, ...: what was kept     then the next 4 outputs
//
// Each pair of row and output has one accumulator. It is filled in steps of 64 inputs and summed in a fixed order, in
// every tile and for any number of rows.
//
// On a core of Zen 4 at 3.7 GHz, whose limit is 118 G terms a second (FMA: 59), products of 2048 x 8192 compute 84 G with
// 16 rows and 100 with 512; of 768 x 3072, 98 and 102.
#include "linear_dot_bf16.h"

#include <atomic>

#include "linear_dot.h"
#include "linear_finish.h"
#include "linear_multiplier.h"
#include "pairs.h"
#include "threads.h"

namespace prejit {

#if !defined(PREJIT_HAS_PAIRS)

bool linear_by_bf16_dots(const Linear&) { return false; }

#else

namespace {

#define PREJIT_BF16 __attribute__((target("avx512bf16"), noinline))
#define PREJIT_BF16_INLINE inline __attribute__((target("avx512bf16"), always_inline))

constexpr int64_t kStep = 2 * kPairInputs;
constexpr int kTileRows = 4;
constexpr int kTileOutputs = 4;

// Inputs that are multiplied at once: 4 outputs of them as bfloat16 (16 KB) and those of 4 rows fill L1.
constexpr int64_t kInputsAtOnce = 2048;
// One output to the next, in what is kept, and one row to the next in x: whole pages would share a few sets of L1.
constexpr int64_t kApart = 32;

// Maximum bytes of a chunk of x, which stays in L2 (1 MB on Zen 4) while W passes. 256 KB take 8 % more time: W passes
// twice as often.
constexpr int64_t kRowBytes = 512 << 10;
// Maximum outputs of a block, and maximum bytes of its sums. Between two chunks a sum is a whole vector.
constexpr int64_t kMostOutputs = 256;
constexpr int64_t kMostSumBytes = 64 << 10;
constexpr int64_t kMostPartialBytes = 256 << 10;
// How far ahead few rows fetch weights, as in linear_dot.h: with 1,024 a product of 2048 x 8192 and 16 rows takes 24 % more.
constexpr int64_t kFetchInputs = 2048;

// Rows from which on streams win nothing, and a tile's outputs lie beside each other: their sums are stored at once.
constexpr int64_t kManyRows = 64;

// Returns the outputs of a tile. 3 or 4 rows need more streams from memory.
constexpr int tile_outputs(int64_t rows) { return rows == 3 || rows == kTileRows ? 6 : kTileOutputs; }

// Returns the inputs of a chunk. One tile of rows reads x and W once, from wherever they are.
int64_t inputs_at_once(int64_t rows, int64_t inputs) {
  return rows <= kTileRows && inputs > kInputsAtOnce ? inputs : kInputsAtOnce;
}

// 64 numbers as bfloat16.
struct Numbers {
  __m512i first, second;
};

// Loads the weights of `some` of 64 inputs, and zeros.
PREJIT_BF16_INLINE Numbers load_weights(const Bf16* from, __mmask64 some) {
  return {_mm512_maskz_loadu_epi16(static_cast<__mmask32>(some), from),
          _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> 32), from + kPairInputs)};
}

// to[i] = sum(v[i]) of 16 vectors, added in the order of sum() in simd.h.
PREJIT_BF16_INLINE void sum_each(const __m512 (&v)[16], float* to) {
  __m512 quads[4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    const __m512 *of = v + 4 * q, *next = of + 2;
    __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(of[0], of[1], 0x44), _mm512_shuffle_f32x4(of[0], of[1], 0xEE));
    __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(next[0], next[1], 0x44), _mm512_shuffle_f32x4(next[0], next[1], 0xEE));
    quads[q] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
  __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(quads[0], quads[1]), _mm512_unpackhi_ps(quads[0], quads[1]));
  __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(quads[2], quads[3]), _mm512_unpackhi_ps(quads[2], quads[3]));
  // Lane 4 l + q is the sum of v[4 q + l].
  __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
  __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  _mm512_storeu_ps(to, _mm512_permutexvar_ps(order, sums));
}

// Where the weights of a tile come from.
enum class From {
  kMemory,         // Used once.
  kMemoryAndKeep,  // Stored for the tiles that follow.
  kKept,
};

// Some rows times some outputs, for `inputs` inputs.
struct Tile {
  const uint16_t* x;
  int64_t x_stride;
  const Bf16* w;
  int64_t w_stride;  // Elements from one output to the next.
  uint16_t* kept;
  int64_t inputs;
  bool begins, ends;
  float* partial;  // Accumulators between the chunks of inputs.
  float* sums;
  int64_t row_sums, output_sums;  // Floats from one row to the next, and from one output to the next.
  int64_t ahead;                  // Inputs from those that a step multiplies to those that it fetches; 0: none.
};

constexpr int64_t kKeptStride = kInputsAtOnce + kApart;

template <int rows, int outputs, From from>
PREJIT_BF16_INLINE void multiply_step(const Tile& t, const uint16_t* const (&x)[rows], const Bf16* const (&w)[outputs],
                                      int64_t k, __mmask64 some, int64_t ahead, __m512 (&total)[rows][outputs]) {
  Numbers weights[outputs];
#pragma GCC unroll 8
  for (int o = 0; o < outputs; ++o) {
    uint16_t* kept = t.kept + o * kKeptStride + k;
    if (ahead)
      for (int half = 0; half < 2; ++half) __builtin_prefetch(w[o] + k + ahead + half * kPairInputs, 0, 2);
    if (from == From::kKept) {
      weights[o] = {_mm512_loadu_si512(kept), _mm512_loadu_si512(kept + kPairInputs)};
      continue;
    }
    weights[o] = load_weights(w[o] + k, some);
    if (from == From::kMemoryAndKeep) {
      _mm512_storeu_si512(kept, weights[o].first);
      _mm512_storeu_si512(kept + kPairInputs, weights[o].second);
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      __m512i some_of_x = _mm512_loadu_si512(x[r] + k + half * kPairInputs);
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o)
        total[r][o] = _mm512_dpbf16_ps(total[r][o], reinterpret_cast<__m512bh>(some_of_x),
                                       reinterpret_cast<__m512bh>(half ? weights[o].second : weights[o].first));
    }
}

template <int rows, int outputs, From from>
PREJIT_BF16 void multiply_tile(const Tile& t) {
  constexpr int kSums = rows * outputs;
  __m512 total[rows][outputs];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < outputs; ++o)
      total[r][o] = t.begins ? _mm512_setzero_ps() : _mm512_loadu_ps(t.partial + (r * outputs + o) * kLanes);
  const uint16_t* x[rows];
  const Bf16* w[outputs];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) x[r] = t.x + r * t.x_stride;
#pragma GCC unroll 8
  for (int o = 0; o < outputs; ++o) w[o] = t.w + o * t.w_stride;
  int64_t k = 0;
  if (int64_t ahead = t.ahead) {
    for (; k + kStep <= t.inputs; k += kStep)
      multiply_step<rows, outputs, from>(t, x, w, k, ~__mmask64{0}, ahead, total);
  } else {
    for (; k + kStep <= t.inputs; k += kStep)
      multiply_step<rows, outputs, from>(t, x, w, k, ~__mmask64{0}, 0, total);
  }
  if (int64_t rest = t.inputs - k)
    multiply_step<rows, outputs, from>(t, x, w, k, (__mmask64{1} << rest) - 1, 0, total);
  if (!t.ends) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < outputs; ++o) _mm512_storeu_ps(t.partial + (r * outputs + o) * kLanes, total[r][o]);
    return;
  }
#pragma GCC unroll 2
  for (int first = 0; first < kSums; first += 16) {
    const int last = first + 16 < kSums ? first + 16 : kSums;
    __m512 some[16] = {};
#pragma GCC unroll 16
    for (int i = first; i < last; ++i) some[i - first] = total[i / outputs][i % outputs];
    float sums[16];
    sum_each(some, sums);
    if (outputs == 4 && t.output_sums == 1) {
#pragma GCC unroll 4
      for (int i = first; i < last; i += 4)
        _mm_storeu_ps(t.sums + i / outputs * t.row_sums, _mm_loadu_ps(sums + i - first));
      continue;
    }
#pragma GCC unroll 16
    for (int i = first; i < last; ++i)
      t.sums[i / outputs * t.row_sums + i % outputs * t.output_sums] = sums[i - first];
  }
}

template <int outputs, From from>
void multiply_rows(const Tile& t, int64_t rows) {
  if (rows >= kTileRows) return multiply_tile<kTileRows, outputs, from>(t);
  if (rows == 3) return multiply_tile<3, outputs, from>(t);
  return rows == 2 ? multiply_tile<2, outputs, from>(t) : multiply_tile<1, outputs, from>(t);
}

// Rows of x, packed.
struct PackedRows {
  int64_t first, rows;
  int64_t inputs, stride;
  const uint16_t* data;
};

// Memory of a thread for a block.
struct Memory {
  uint16_t* kept;
  float* partial;
  float *sums, *up_sums;
};

// sums[row, output * spacing] = x[row] . w[output * spacing] for all rows, some outputs and the inputs of a chunk.
template <int outputs>
void dot_outputs(const PackedRows& x, const Bf16* w, int64_t spacing, int64_t k, int64_t inputs, const Memory& memory,
                 float* partial, float* sums, int64_t stride) {
  int64_t passes = parts_of(x.rows, kTileRows), bytes = sizeof(Bf16);
  bool are_many = x.rows >= kManyRows;
  // Few passes fetch in each of their steps, later ones at least the next output. Many share the fetching, between two passes.
  const char* next_tile = reinterpret_cast<const char*>(w + k + outputs * x.inputs);
  int64_t lines = are_many ? parts_of(inputs * bytes, 64 * passes) : 0;  // Of each output, in a pass.
  for (int64_t pass = 0; pass < passes; ++pass) {
    int64_t row = pass * kTileRows;
    for (int64_t line = pass * lines; line < (pass + 1) * lines; ++line)
      for (int o = 0; o < outputs; ++o) __builtin_prefetch(next_tile + o * x.inputs * bytes + line * 64, 0, 2);
    Tile tile = {x.data + row * x.stride + k, x.stride, w + k, spacing * x.inputs, memory.kept, inputs,
                    k == 0, k + inputs == x.inputs, partial + row * outputs * kLanes, sums + row * stride,
                    stride, spacing, are_many ? 0 : pass > 0 && x.inputs > kFetchInputs ? x.inputs : kFetchInputs};
    if constexpr (outputs <= kTileOutputs) {
      if (are_many) {
        if (pass == 0)
          multiply_tile<kTileRows, outputs, From::kMemoryAndKeep>(tile);
        else
          multiply_rows<outputs, From::kKept>(tile, x.rows - row);
        continue;
      }
    }
    multiply_rows<outputs, From::kMemory>(tile, x.rows - row);
  }
}

// sums[row, output] = x[row] . w[output] for `count` consecutive outputs; a tile's outputs are streams, as in linear_dot.h.
template <int outputs>
void dot_block(const PackedRows& x, const Bf16* w, int64_t count, const Memory& memory, float* sums, int64_t stride) {
  int64_t spacing = count / outputs, done = spacing * outputs;
  bool are_adjacent = x.rows >= kManyRows;
  int64_t at_once = inputs_at_once(x.rows, x.inputs);
  int64_t output_floats = parts_of(x.rows, kTileRows) * kTileRows * kLanes;
  for (int64_t k = 0; k == 0 || k < x.inputs; k += at_once) {
    int64_t inputs = least(x.inputs - k, at_once);
    for (int64_t j = 0; j < spacing; ++j) {
      int64_t first = j * (are_adjacent ? outputs : 1);
      dot_outputs<outputs>(x, w + first * x.inputs, are_adjacent ? 1 : spacing, k, inputs, memory,
                              memory.partial + j * outputs * output_floats, sums + first, stride);
    }
    for (int64_t j = done; j < count; ++j)
      dot_outputs<1>(x, w + j * x.inputs, 1, k, inputs, memory, memory.partial + j * output_floats, sums + j, stride);
  }
}

void dot_block(const PackedRows& x, const Weights& weights, int64_t output, int64_t count, const Memory& memory,
               float* sums, int64_t stride) {
  const Bf16* w = static_cast<const Bf16*>(weights.data) + output * x.inputs;
  auto run = tile_outputs(x.rows) == kTileOutputs ? dot_block<kTileOutputs> : dot_block<6>;
  run(x, w, count, memory, sums, stride);
}

// Returns this thread's memory for blocks of `size` outputs, with null pointers if memory is exhausted.
Memory memory_of(const Linear& p, int64_t rows, int64_t size) {
  bool has_chunks = inputs_at_once(rows, p.inputs) < p.inputs;
  int64_t partial = has_chunks ? parts_of(rows, kTileRows) * kTileRows * size * kLanes : 0, sums = rows * size;
  size_t kept_bytes = kTileOutputs * kKeptStride * sizeof(uint16_t);
  char* memory =
      static_cast<char*>(scratch(kept_bytes + (partial + sums * (p.gated ? 2 : 1)) * sizeof(float), 1));
  if (!memory) return {};
  float* floats = reinterpret_cast<float*>(memory + kept_bytes);
  return {reinterpret_cast<uint16_t*>(memory), floats, floats + partial, floats + partial + sums};
}

// Computes the rows of y that x has.
bool multiply_all(const Linear& p, const PackedRows& x) {
  bool has_chunks = inputs_at_once(x.rows, p.inputs) < p.inputs;
  int64_t most_sums = has_chunks ? kMostPartialBytes / 64 : kMostSumBytes / 4;
  int64_t most = least(kMostOutputs, most_sums / x.rows);
  int64_t size = dot_block_outputs(tile_outputs(x.rows), p.inputs * 2, p.outputs, threads(), most);
  std::atomic<bool> has_memory{true};
  parallel_for(parts_of(p.outputs, size), [&](int64_t block) {
    Memory memory = memory_of(p, x.rows, size);
    if (!memory.kept) return has_memory.store(false, std::memory_order_relaxed);
    int64_t first = block * size, count = least(p.outputs - first, size);
    dot_block(x, p.weights, first, count, memory, memory.sums, size);
    if (p.gated) dot_block(x, p.up, first, count, memory, memory.up_sums, size);
    for (int64_t r = 0; r < x.rows; ++r)
      finish(p, memory.sums + r * size, memory.up_sums + r * size, x.first + r, first, count);
  });
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace

bool linear_by_bf16_dots(const Linear& p) {
  int64_t stride = parts_of(p.inputs, kStep) * kStep + kApart;
  int64_t most = kRowBytes / (least(stride, kInputsAtOnce) * static_cast<int64_t>(sizeof(uint16_t)));
  int64_t parts = parts_of(p.rows, most);
  int64_t at_once = parts_of(parts_of(p.rows, parts), kTileRows) * kTileRows;
  uint16_t* data = static_cast<uint16_t*>(scratch(least(at_once, p.rows) * stride * sizeof(uint16_t)));
  if (!data) return false;
  for (int64_t row = 0; row < p.rows; row += at_once) {
    PackedRows x = {row, least(p.rows - row, at_once), p.inputs, stride, data};
    parallel_for(parts_of(x.rows, kTileRows), [&](int64_t tile) {
      int64_t first = tile * kTileRows;
      for (int64_t r = first; r < least(x.rows, first + kTileRows); ++r)
        store_pairs(p.x + (row + r) * p.inputs, p.inputs, data + r * stride, stride - kApart);
    });
    if (!multiply_all(p, x)) return false;
  }
  return true;
}

#endif  // PREJIT_HAS_PAIRS

}  // namespace prejit
