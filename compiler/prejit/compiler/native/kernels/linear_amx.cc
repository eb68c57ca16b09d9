// W is multiplied from the left: a tile of sums is [outputs, rows]. So W, which comes from memory, is used in place, row
// by row, and only x is transposed, once for the whole product:
//
//   x       [M, K]   ->  [M / 16][K / 2][16 rows] pairs of inputs       "group" of 16 rows, pack_group
//   W chunk [32, K'] ->  [K' / 32][32 outputs][32 inputs] bfloat16      "panel", stays in L1, pack_panel
//   sums             ->  [2 groups][2 halves][16 outputs][16 rows]      "tile", transposed and finished, transpose_tile
//
// Inputs are padded with zeros to whole steps of 32, outputs and rows to whole tiles, so no multiplier has an edge.
#include "linear_amx.h"

#include <atomic>

#include "linear_finish.h"
#include "linear_multiplier.h"
#include "pairs.h"
#include "simd.h"
#include "threads.h"
#include "transpose.h"

namespace prejit {

#if !defined(PREJIT_HAS_PAIRS)

bool linear_by_amx(const Linear&) { return false; }

#else

namespace {

constexpr int64_t kStep = 32;   // Inputs of a step: 16 pairs, one row of a tile.
constexpr int64_t kGroup = 16;  // Rows of a group, and outputs of half a panel.
constexpr int64_t kPanel = 2 * kGroup;
constexpr int64_t kTile = 2 * kGroup;  // Maximum rows of a tile: one group or two.
constexpr int64_t kGroupSums = kGroup * kPanel;
constexpr int64_t kTileSums = kTile * kPanel;
constexpr int64_t kStepPairs = kGroup * kStep / 2;   // In a group.
constexpr int64_t kStepWeights = kPanel * kStep;     // In a panel.

// Inputs that are summed at once: a panel of them (16 KB) and those of a tile, which stream past it from L2, fit L1
// together. With twice as many, or half as many, products of 512 rows take a seventh longer (Sapphire Rapids).
constexpr int64_t kInputsAtOnce = 256;

// Rows that are packed at once. Each part of them reads W again, from memory and into panels.
constexpr int64_t kRowsAtOnce = 1024;

// Maximum of a block: the tiles' inputs of one chunk (256 KB) and the sums (512 KB) stay in L2 while panels pass.
constexpr int64_t kPanelsAtOnce = 8;
constexpr int64_t kTilesAtOnce = 16;

// Maximum tiles that read a panel in place: packing takes a fifth longer for these, and a tenth less for more tiles.
constexpr int64_t kTilesInPlace = 2;

// to[pair, row] = x[row, pair] for `count` rows of a group, zeros for the others.
void pack_group(const float* x, int64_t count, int64_t inputs, uint32_t* to) {
  for (int64_t k = 0; k < inputs; k += kStep, to += kStepPairs) {
    Floats v[kLanes] = {};
    for (int64_t row = 0; row < count; ++row) v[row] = load_pairs(x + row * inputs + k, inputs - k);
    transpose(v);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(to) + i * kGroup, v[i]);
  }
}

// to[step, output, input] = w[output, input] for `count` outputs of a panel and `inputs` of a row's `stride`.
template <typename W>
void pack_panel(const W* w, int64_t count, int64_t inputs, int64_t stride, uint16_t* to) {
  for (int64_t output = 0; output < kPanel; ++output, w += stride, to += kStep) {
    for (int64_t k = 0; k < inputs; k += kStep) {
      Floats v = output < count ? load_pairs(w + k, inputs - k) : Floats{};
      memcpy(to + k * kPanel, &v, sizeof v);
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
  const uint16_t* data;
  int64_t stride = kStep;       // From one output to the next.
  int64_t step = kStepWeights;  // From one step to the next.
};

// sums = (begins ? 0 : sums) + a panel times one group of x or two, `steps` steps.
struct Operands {
  Panel w;
  const uint32_t* x;
  int64_t group_pairs;  // From one group of x to the next.
  int64_t steps;
  bool begins;
  float* sums;
  Fetch fetch;
};

#define PREJIT_AMX __attribute__((target("amx-tile,amx-bf16"), noinline))

template <int groups>
PREJIT_AMX void multiply_amx(const Operands& of) {
  // GCC's intrinsics do not declare that they read memory.
  asm volatile("" ::: "memory");
  const uint16_t* w = of.w.data;
  const long stride = of.w.stride * sizeof *w;  // Bytes.
  const uint32_t* x = of.x;
  const uint32_t* next = x + of.group_pairs;
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
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, w + kGroup * of.w.stride, stride);
    _tile_dpbf16ps(1, 5, 6);
    if (groups == 2) {
      _tile_loadd(7, next, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
    w += of.w.step, x += kStepPairs, next += kStepPairs;
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

void multiply(int64_t groups, const Operands& of) { return groups == 1 ? multiply_amx<1>(of) : multiply_amx<2>(of); }

// Rows [first, first + rows) of p, packed in groups.
struct PackedRows {
  int64_t first, rows;
  int64_t group_pairs;
  const uint32_t* data;
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
  bool ends;                // Whether it completes the sums.
};

int64_t chunks_of(int64_t inputs) { return inputs > 0 ? parts_of(inputs, kInputsAtOnce) : 1; }

Step step_of(const Linear& p, const Block& block, int64_t index) {
  int64_t chunks = chunks_of(p.inputs);
  int64_t size = parts_of(parts_of(p.inputs, chunks), kStep) * kStep;
  int64_t chunk = index / block.panels % chunks;
  bool is_up = index >= block.panels * chunks;
  Step step;
  step.weights = is_up ? &p.up : &p.weights;
  step.input = least(chunk * size, p.inputs);
  step.inputs = least(p.inputs - step.input, size);
  step.panel = index % block.panels;
  step.output = (block.panel + step.panel) * kPanel;
  step.outputs = least(p.outputs - step.output, kPanel);
  step.ends = chunk + 1 == chunks && is_up == p.gated;
  return step;
}

// Returns the weights of a step, packed unless they can be read in place: if whole, and for few tiles.
Panel panel_of(const Linear& p, const Step& step, int64_t tiles, uint16_t* packed) {
  int64_t at = step.output * p.inputs + step.input;
  if (step.weights->dtype == Dtype::kInt8) {
    pack_panel(static_cast<const int8_t*>(step.weights->data) + at, step.outputs, step.inputs, p.inputs, packed);
    return {packed};
  }
  const Bf16* w = static_cast<const Bf16*>(step.weights->data) + at;
  if (tiles <= kTilesInPlace && step.outputs == kPanel && step.inputs % kStep == 0)
    return {reinterpret_cast<const uint16_t*>(w), p.inputs, kStep};
  pack_panel(w, step.outputs, step.inputs, p.inputs, packed);
  return {packed};
}

// Shares the fetching of a step's weights among the tiles of the step before it, of `steps` steps each.
Fetch fetch_of(const Linear& p, const Step& next, int64_t tile, int64_t tiles, int64_t steps) {
  int64_t bytes = next.weights->dtype == Dtype::kBfloat16 ? 2 : 1;
  int64_t row = next.outputs * tile / tiles, rows = next.outputs * (tile + 1) / tiles - row;
  int64_t lines = (next.inputs * bytes + 63) / 64;
  const char* data = static_cast<const char*>(next.weights->data);
  return {data + ((next.output + row) * p.inputs + next.input) * bytes, p.inputs * bytes, lines,
          steps ? parts_of(rows * lines, steps) : 0};
}

// Writes the sums of a tile row by row.
void transpose_tile(const float* sums, int64_t groups, float* to) {
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t half = 0; half < 2; ++half, sums += kGroup * kGroup) {
      Floats v[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) v[i] = load(sums + i * kGroup);
      transpose(v);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (group * kGroup + i) * kPanel + half * kGroup, v[i]);
    }
}

bool multiply_block(const Linear& p, const PackedRows& x, const Block& block) {
  int64_t all_sums = block.panels * block.tiles * kTileSums;
  size_t panel_bytes = kInputsAtOnce * kPanel * sizeof(uint16_t);
  char* memory = static_cast<char*>(scratch(panel_bytes + all_sums * (p.gated ? 2 : 1) * sizeof(float), 1));
  if (!memory) return false;
  uint16_t* packed = reinterpret_cast<uint16_t*>(memory);
  float* sums = reinterpret_cast<float*>(memory + panel_bytes);
  int64_t all_steps = block.panels * chunks_of(p.inputs) * (p.gated ? 2 : 1);
  take_tiles();
  for (int64_t s = 0; s < all_steps; ++s) {
    Step step = step_of(p, block, s), next = step_of(p, block, s + 1 < all_steps ? s + 1 : s);
    Panel panel = panel_of(p, step, block.tiles, packed);
    for (int64_t t = 0; t < block.tiles; ++t) {
      int64_t row = (block.tile + t) * kTile, rows = least(x.rows - row, kTile);
      int64_t groups = parts_of(rows, kGroup), steps = parts_of(step.inputs, kStep);
      float* tile = sums + (step.panel * block.tiles + t) * kTileSums;
      float* to = step.weights == &p.up ? tile + all_sums : tile;
      multiply(groups,
               {panel, x.data + row / kGroup * x.group_pairs + step.input * (kGroup / 2), x.group_pairs, steps,
                step.input == 0, to, fetch_of(p, next, t, block.tiles, steps)});
      if (!step.ends) continue;
      alignas(64) float by_row[kTileSums], up_by_row[kTileSums];
      transpose_tile(tile, groups, by_row);
      if (p.gated) transpose_tile(to, groups, up_by_row);
      for (int64_t r = 0; r < rows; ++r)
        finish(p, by_row + r * kPanel, up_by_row + r * kPanel, x.first + row + r, step.output, step.outputs);
    }
  }
  release_tiles();
  return true;
}

}  // namespace

bool linear_by_amx(const Linear& p) {
  int64_t parts = parts_of(p.rows, kRowsAtOnce);
  int64_t panels = parts_of(p.outputs, kPanel);
  int64_t group_pairs = parts_of(p.inputs, kStep) * kStepPairs;
  std::atomic<bool> has_memory{true};
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    int64_t rows = (p.rows - row) / (parts - part);
    int64_t groups = parts_of(rows, kGroup), tiles = parts_of(rows, kTile);
    uint32_t* data = static_cast<uint32_t*>(scratch((groups * group_pairs + kLanes) * sizeof(uint32_t)));
    if (!data) return false;
    PackedRows x{row, rows, group_pairs, data};
    row += rows;
    parallel_for(groups, [&](int64_t group) {
      int64_t first = group * kGroup;
      const float* from = p.x + (x.first + first) * p.inputs;
      pack_group(from, least(x.rows - first, kGroup), p.inputs, data + group * group_pairs);
    });
    // Blocks are as large as caches allow, with a few for each thread.
    int64_t enough = 4 * threads();
    int64_t splits = parts_of(tiles, kTilesAtOnce), bands = parts_of(panels, kPanelsAtOnce);
    if (bands * splits < enough) bands = least(panels, parts_of(enough, splits));
    parallel_for(bands * splits, [&](int64_t block) {
      int64_t band = block / splits, split = block % splits;
      int64_t panel = panels * band / bands, tile = tiles * split / splits;
      Block at = {panel, panels * (band + 1) / bands - panel, tile, tiles * (split + 1) / splits - tile};
      if (!multiply_block(p, x, at)) has_memory.store(false, std::memory_order_relaxed);
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

#endif  // PREJIT_HAS_PAIRS

}  // namespace prejit
