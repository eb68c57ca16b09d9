// W is multiplied from the left: a tile of sums is [outputs, rows]. So W, which comes from memory, is used in place, row
// by row, and only x is transposed, once for the whole product:
//
//   x       [M, K]   ->  [M / 16][K / 2][16 rows] pairs of inputs       "group" of 16 rows, pack_group
//   W chunk [32, K'] ->  [K' / 32][32 outputs][32 inputs] bfloat16      "panel", stays in L1, pack_panel
//   sums             ->  [2 groups][2 halves][16 outputs][16 rows]      "tile", transposed and finished, finish_block
//
// With int8 weights a step has 64 inputs, four of them are where a pair is, and the two groups of a tile are the first and
// the second digits of the same 16 rows (linear_digits.h). Those sums are exact.
//
// Inputs are padded with zeros to whole steps, outputs and rows to whole tiles, so no multiplier has an edge.
#include "linear_amx.h"

#include <atomic>

#include "linear_digits.h"
#include "linear_finish.h"
#include "linear_multiplier.h"
#include "pairs.h"
#include "simd.h"
#include "threads.h"
#include "transpose.h"

namespace prejit {

#if !defined(PREJIT_HAS_PAIRS)

bool linear_by_amx(const Linear&) { return false; }
bool digits_by_amx(const Linear&, bool) { return false; }

#else

namespace {

constexpr int64_t kStepBytes = 64;  // Of a row of a tile.
constexpr int64_t kGroup = 16;      // Rows of a group, and outputs of half a panel.
constexpr int64_t kPanel = 2 * kGroup;
constexpr int64_t kTileSums = 2 * kGroup * kPanel;
constexpr int64_t kStepWords = kGroup * kStepBytes / 4;    // In a group.
constexpr int64_t kPanelStepBytes = kPanel * kStepBytes;

template <typename W>
constexpr bool kAreDigits = sizeof(W) == 1;
template <typename W>
constexpr int64_t kStep = kStepBytes / sizeof(W);  // Inputs.
template <typename W>
constexpr int64_t kTile = kAreDigits<W> ? kGroup : 2 * kGroup;  // Maximum rows of a tile.

// Bytes of an output that are summed at once: a panel of them (16 KB) and those of a tile, which stream past it from L2,
// fit L1 together. With twice as many, or half as many, products of 512 rows take a seventh longer (Sapphire Rapids).
constexpr int64_t kBytesAtOnce = 512;

// Rows that are packed at once. Each part of them reads W again, from memory and into panels.
constexpr int64_t kRowsAtOnce = 1024;

// Maximum of a block: the tiles' inputs of one chunk (128 KB) and the sums (256 KB, twice that if gated) stay in L2 while
// panels pass, beside what is fetched. With twice as many tiles products take a tenth longer, and a third in some minutes.
constexpr int64_t kPanelsAtOnce = 8;
constexpr int64_t kTilesAtOnce = 8;

// A row of y is fetched so many rows before it is written: stores to lines that are in no near cache would wait for them.
constexpr int64_t kRowsAhead = 4;

// Maximum tiles that read a panel in place: packing takes a fifth longer for these, and a tenth less for more tiles.
constexpr int64_t kTilesInPlace = 2;

// to[word, row] = row[word] for whole steps of 16 rows.
void transpose_words(const char* rows, int64_t stride, int64_t bytes, uint32_t* to) {
  for (int64_t at = 0; at < bytes; at += kStepBytes, to += kStepWords) {
    Floats v[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) v[i] = load_as<Floats>(rows + i * stride + at);
    store_transposed(v, reinterpret_cast<float*>(to), kGroup);
  }
}

// to[pair, row] = x[row, pair] for `count` rows of a group, zeros for the others.
void pack_group(const float* x, int64_t count, int64_t inputs, uint32_t* to) {
  for (int64_t k = 0; k < inputs; k += kStep<Bf16>, to += kStepWords) {
    Floats v[kLanes] = {};
    for (int64_t row = 0; row < count; ++row) v[row] = load_pairs(x + row * inputs + k, inputs - k);
    store_transposed(v, reinterpret_cast<float*>(to), kGroup);
  }
}

// The same for the first digits, then the second ones. Returns false if memory is exhausted.
bool pack_digits(const float* x, int64_t count, int64_t inputs, bool is_wide, uint32_t* to, int64_t group_words,
                 Digits* found) {
  int64_t bytes = inputs_of_vectors(inputs), stride = bytes + 64;  // Whole pages would share sets of L1.
  char* digits = static_cast<char*>(scratch(2 * kGroup * stride, 1));
  if (!digits) return false;
  memset(digits, 0, 2 * kGroup * stride);
  char* second = digits + kGroup * stride;
  for (int64_t row = 0; row < count; ++row)
    found[row] = round_row(x + row * inputs, inputs, is_wide, Store::kBytes, digits + row * stride, second + row * stride);
  transpose_words(digits, stride, bytes, to);
  transpose_words(second, stride, bytes, to + group_words);
  return true;
}

PREJIT_INLINE Floats load_step(const Bf16* from, int64_t count) { return load_pairs(from, count); }
PREJIT_INLINE Floats load_step(const int8_t* from, int64_t count) {
  if (count >= kStepBytes) return load_as<Floats>(from);
  return reinterpret_cast<Floats>(_mm512_maskz_loadu_epi8((uint64_t{1} << count) - 1, from));
}

// to[step, output, input] = w[output, input] for `count` outputs of a panel and `inputs` of a row's `stride`.
template <typename W>
void pack_panel(const W* w, int64_t count, int64_t inputs, int64_t stride, char* to) {
  for (int64_t output = 0; output < kPanel; ++output, w += stride, to += kStepBytes) {
    char* step = to;
    for (int64_t k = 0; k < inputs; k += kStep<W>, step += kPanelStepBytes) {
      Floats v = output < count ? load_step(w + k, inputs - k) : Floats{};
      memcpy(step, &v, sizeof v);
    }
  }
}

// Memory that is packed next, fetched into L2 while a tile is multiplied: some lines each step, row by row.
struct Fetch {
  const char* row;
  int64_t row_bytes;  // From one row to the next.
  int64_t lines;      // In a row.
  int64_t each;       // Lines for each step.
};

struct Fetching {
  Fetch fetch;
  int64_t line = 0;
  PREJIT_INLINE void step() {
    for (int64_t i = 0; i < fetch.each; ++i) {
      __builtin_prefetch(fetch.row + line * 64, 0, 2);
      if (++line == fetch.lines) line = 0, fetch.row += fetch.row_bytes;
    }
  }
};

// Weights of 32 outputs, packed or in place.
struct Panel {
  const char* data;
  int64_t stride = kStepBytes;     // From one output to the next.
  int64_t step = kPanelStepBytes;  // From one step to the next.
};

// sums = (begins ? 0 : sums) + a panel times one group of x or two, `steps` steps.
struct Operands {
  Panel w;
  const uint32_t* x;
  int64_t group_words;  // From one group of x to the next.
  int64_t steps;
  bool begins;
  float* sums;
  Fetch fetch;
};

#define PREJIT_AMX __attribute__((target("amx-tile,amx-bf16,amx-int8"), noinline))
// A name of a tile is a literal.
#define PREJIT_MULTIPLY(sums, w, x)    \
  if constexpr (kAreDigits<W>)         \
    _tile_dpbssd(sums, w, x);          \
  else                                 \
    _tile_dpbf16ps(sums, w, x)

template <typename W, int groups>
PREJIT_AMX void multiply_amx(const Operands& of) {
  // GCC's intrinsics do not declare that they read memory.
  asm volatile("" ::: "memory");
  const char* w = of.w.data;
  const long stride = of.w.stride;
  const uint32_t* x = of.x;
  const uint32_t* next = x + of.group_words;
  Fetching fetching{of.fetch};
  float* sums = of.sums;
  if (of.begins) {
    _tile_zero(0);
    _tile_zero(1);
    if (groups == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + 256, 64);
    if (groups == 2) {
      _tile_loadd(2, sums + 512, 64);
      _tile_loadd(3, sums + 768, 64);
    }
  }
  for (int64_t step = 0; step < of.steps; ++step) {
    fetching.step();
    _tile_loadd(4, w, stride);
    _tile_loadd(6, x, 64);
    PREJIT_MULTIPLY(0, 4, 6);
    _tile_loadd(5, w + kGroup * stride, stride);
    PREJIT_MULTIPLY(1, 5, 6);
    if (groups == 2) {
      _tile_loadd(7, next, 64);
      PREJIT_MULTIPLY(2, 4, 7);
      PREJIT_MULTIPLY(3, 5, 7);
    }
    w += of.w.step, x += kStepWords, next += kStepWords;
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (groups == 2) {
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
  }
}

struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64, "as the instruction reads it");
const TileConfig tile_config;

PREJIT_AMX void take_tiles() { _tile_loadconfig(&tile_config); }
PREJIT_AMX void release_tiles() { _tile_release(); }

template <typename W>
void multiply(int64_t groups, const Operands& of) {
  if (groups == 1) return multiply_amx<W, 1>(of);
  multiply_amx<W, 2>(of);
}

// Rows [first, first + rows) of p, packed in groups.
struct PackedRows {
  int64_t first, rows;
  int64_t group_words;
  uint32_t* data;
  Digits* digits;
};

// Some panels of W and some tiles of x.
struct Block {
  int64_t panel, panels;
  int64_t tile, tiles;
};

// One panel of W for some inputs, packed and multiplied in one step.
struct Step {
  const Weights* weights;
  int64_t input, inputs;
  int64_t panel;            // In the block.
  int64_t output, outputs;  // The first output, and their number.
};

template <typename W>
int64_t chunks_of(int64_t inputs) {
  return inputs > 0 ? parts_of(inputs * sizeof(W), kBytesAtOnce) : 1;
}

template <typename W>
Step step_of(const Linear& p, const Block& block, int64_t index) {
  int64_t chunks = chunks_of<W>(p.inputs);
  int64_t size = parts_of(parts_of(p.inputs, chunks), kStep<W>) * kStep<W>;
  int64_t chunk = index / block.panels % chunks;
  bool is_up = index >= block.panels * chunks;
  Step step;
  step.weights = is_up ? &p.up : &p.weights;
  step.input = least(chunk * size, p.inputs);
  step.inputs = least(p.inputs - step.input, size);
  step.panel = index % block.panels;
  step.output = (block.panel + step.panel) * kPanel;
  step.outputs = least(p.outputs - step.output, kPanel);
  return step;
}

// Returns the weights of a step, packed unless they can be read in place: if whole, and for few tiles.
template <typename W>
Panel panel_of(const Linear& p, const Step& step, int64_t tiles, char* packed) {
  const W* w = static_cast<const W*>(step.weights->data) + step.output * p.inputs + step.input;
  if (tiles <= kTilesInPlace && step.outputs == kPanel && step.inputs % kStep<W> == 0)
    return {reinterpret_cast<const char*>(w), p.inputs * static_cast<int64_t>(sizeof(W)), kStepBytes};
  pack_panel(w, step.outputs, step.inputs, p.inputs, packed);
  return {packed};
}

// Shares the fetching of a step's weights among the tiles of the step before it, of `steps` steps each.
template <typename W>
Fetch fetch_of(const Linear& p, const Step& next, int64_t tile, int64_t tiles, int64_t steps) {
  constexpr int64_t bytes = sizeof(W);
  int64_t row = next.outputs * tile / tiles, rows = next.outputs * (tile + 1) / tiles - row;
  int64_t lines = (next.inputs * bytes + 63) / 64;
  const char* data = static_cast<const char*>(next.weights->data);
  return {data + ((next.output + row) * p.inputs + next.input) * bytes, p.inputs * bytes, lines,
          steps ? parts_of(rows * lines, steps) : 0};
}

// Writes the sums of a tile row by row: to[row, output], `width` floats from one row to the next.
void transpose_tile(const float* sums, int64_t groups, float* to, int64_t width) {
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t half = 0; half < 2; ++half, sums += kGroup * kGroup) {
      Floats v[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) v[i] = load(sums + i * kGroup);
      store_transposed(v, to + group * kGroup * width + half * kGroup, width);
    }
}

// How many groups of a tile are multiplied: rows of digits may all have first ones only.
template <typename W>
int64_t groups_of(const PackedRows& x, int64_t row, int64_t rows) {
  if constexpr (!kAreDigits<W>) return parts_of(rows, kGroup);
  for (int64_t r = row; r < row + rows; ++r)
    if (x.digits[r].has_second) return 2;
  return 1;
}

// Adds up the weights of some outputs.
void sum_weights(const int8_t* w, int64_t outputs, int64_t inputs, int32_t* sums) {
  for (int64_t output = 0; output < outputs; ++output, w += inputs) {
    Ints sum = {};
    for (int64_t k = 0; k < inputs; k += kStepBytes)
      sum = sum + sums_of_pairs(pairs_of(reinterpret_cast<Ints>(load_step(w + k, inputs - k))));
    sums[output] = static_cast<int32_t>(total(sum));
  }
}

// Writes the sums of a row of digits in the place of those of its first ones; the others lie kGroup rows behind them.
void add_digits(const Digits& row, int64_t groups, const int32_t* of_weights, int64_t width, float* sums) {
  for (int64_t i = 0; i < width; i += kLanes) {
    Ints first = load_as<Ints>(sums + i), second = {};
    if (groups == 2) second = load_as<Ints>(sums + kGroup * width + i);
    if (row.zero) first = first + load_as<Ints>(of_weights + i) * row.zero;
    store(sums + i, fixed_sum(first, second, splat(row.factor)));
  }
}

// The sums of a block, tile by tile of each panel, and what is made of them; each is there twice if the product is gated.
struct Sums {
  float* tiles;         // [panels][tiles][kTileSums]
  float* rows;          // [32][width] of one tile
  int32_t* of_weights;  // [width], with digits whose rows have zeros
  int64_t width;        // Outputs of whole panels.
};

bool has_zeros(const PackedRows& x, const Block& block) {
  for (int64_t row = block.tile * kGroup; row < least((block.tile + block.tiles) * kGroup, x.rows); ++row)
    if (x.digits[row].zero) return true;
  return false;
}

// Makes y of the sums of a block. A row of y is written at once: its lines are one after the other.
template <typename W>
void finish_block(const Linear& p, const PackedRows& x, const Block& block, const Sums (&sums)[2]) {
  int64_t first = block.panel * kPanel, outputs = least(p.outputs - first, block.panels * kPanel);
  int64_t products = p.gated ? 2 : 1;
  bool is_shifted = false;
  if constexpr (kAreDigits<W>) is_shifted = has_zeros(x, block);
  for (int64_t i = 0; is_shifted && i < products; ++i) {
    const int8_t* w = static_cast<const int8_t*>((i ? p.up : p.weights).data);
    sum_weights(w + first * p.inputs, outputs, p.inputs, sums[i].of_weights);
  }
  for (int64_t t = 0; t < block.tiles; ++t) {
    int64_t row = (block.tile + t) * kTile<W>, rows = least(x.rows - row, kTile<W>);
    int64_t groups = groups_of<W>(x, row, rows);
    for (int64_t i = 0; i < products; ++i)
      for (int64_t panel = 0; panel < block.panels; ++panel)
        transpose_tile(sums[i].tiles + (panel * block.tiles + t) * kTileSums, groups, sums[i].rows + panel * kPanel,
                       sums[i].width);
    for (int64_t r = 0; r < rows; ++r) {
      if (int64_t ahead = row + r + kRowsAhead; ahead < x.rows)
        for (int64_t i = 0; i < outputs; i += kLanes) __builtin_prefetch(p.y + (x.first + ahead) * p.outputs + first + i, 1);
      int64_t at = r * sums[0].width;
      if constexpr (kAreDigits<W>)
        for (int64_t i = 0; i < products; ++i)
          add_digits(x.digits[row + r], groups, sums[i].of_weights, sums[i].width, sums[i].rows + at);
      finish(p, sums[0].rows + at, p.gated ? sums[1].rows + at : nullptr, x.first + row + r, first, outputs);
    }
  }
}

template <typename W>
bool multiply_block(const Linear& p, const PackedRows& x, const Block& block) {
  int64_t width = block.panels * kPanel, tile_floats = block.panels * block.tiles * kTileSums;
  int64_t floats = tile_floats + kPanel * width + width, panel_floats = kBytesAtOnce * kPanel / 4;
  float* packed = static_cast<float*>(scratch((panel_floats + floats * (p.gated ? 2 : 1)) * sizeof(float), 1));
  if (!packed) return false;
  Sums sums[2] = {};
  for (int i = 0; i < (p.gated ? 2 : 1); ++i) {
    float* at = packed + panel_floats + i * floats;
    sums[i] = {at, at + tile_floats, reinterpret_cast<int32_t*>(at + tile_floats + kPanel * width), width};
  }
  int64_t all_steps = block.panels * chunks_of<W>(p.inputs) * (p.gated ? 2 : 1);
  take_tiles();
  for (int64_t s = 0; s < all_steps; ++s) {
    Step step = step_of<W>(p, block, s), next = step_of<W>(p, block, s + 1 < all_steps ? s + 1 : s);
    Panel panel = panel_of<W>(p, step, block.tiles, reinterpret_cast<char*>(packed));
    float* to = sums[step.weights == &p.up].tiles + step.panel * block.tiles * kTileSums;
    for (int64_t t = 0; t < block.tiles; ++t, to += kTileSums) {
      int64_t row = (block.tile + t) * kTile<W>, steps = parts_of(step.inputs, kStep<W>);
      int64_t groups = groups_of<W>(x, row, least(x.rows - row, kTile<W>));
      const uint32_t* group = x.data + row * 2 / kTile<W> * x.group_words + step.input / kStep<W> * kStepWords;
      multiply<W>(groups, {panel, group, x.group_words, steps, step.input == 0, to,
                           fetch_of<W>(p, next, t, block.tiles, steps)});
    }
  }
  release_tiles();
  finish_block<W>(p, x, block, sums);
  return true;
}

template <typename W>
bool multiply_all(const Linear& p, bool is_wide) {
  int64_t parts = parts_of(p.rows, kRowsAtOnce);
  int64_t panels = parts_of(p.outputs, kPanel);
  int64_t group_words = parts_of(p.inputs, kStep<W>) * kStepWords;
  std::atomic<bool> has_memory{true};
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    int64_t rows = (p.rows - row) / (parts - part);
    int64_t tiles = parts_of(rows, kTile<W>), blocks_of_rows = parts_of(rows, kGroup);
    int64_t words = (kAreDigits<W> ? 2 : 1) * blocks_of_rows * group_words + kLanes;
    uint32_t* data = static_cast<uint32_t*>(scratch(words * sizeof(uint32_t) + rows * sizeof(Digits)));
    if (!data) return false;
    PackedRows x{row, rows, group_words, data, reinterpret_cast<Digits*>(data + words)};
    row += rows;
    parallel_for(blocks_of_rows, [&](int64_t group) {
      int64_t first = group * kGroup, count = least(x.rows - first, kGroup);
      const float* from = p.x + (x.first + first) * p.inputs;
      if constexpr (!kAreDigits<W>)
        pack_group(from, count, p.inputs, data + group * group_words);
      else if (!pack_digits(from, count, p.inputs, is_wide, data + 2 * group * group_words, group_words, x.digits + first))
        has_memory.store(false, std::memory_order_relaxed);
    });
    // Blocks are as large as caches allow, with a few for each thread.
    int64_t enough = 4 * threads();
    int64_t splits = parts_of(tiles, kTilesAtOnce), bands = parts_of(panels, kPanelsAtOnce);
    if (bands * splits < enough) bands = least(panels, parts_of(enough, splits));
    parallel_for(bands * splits, [&](int64_t block) {
      int64_t band = block / splits, split = block % splits;
      int64_t panel = panels * band / bands, tile = tiles * split / splits;
      Block at = {panel, panels * (band + 1) / bands - panel, tile, tiles * (split + 1) / splits - tile};
      if (!multiply_block<W>(p, x, at)) has_memory.store(false, std::memory_order_relaxed);
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace

bool linear_by_amx(const Linear& p) { return multiply_all<Bf16>(p, false); }
bool digits_by_amx(const Linear& p, bool is_wide) { return multiply_all<int8_t>(p, is_wide); }

#endif  // PREJIT_HAS_PAIRS

}  // namespace prejit
