#include "linear.h"

#include <atomic>

#include "linear_bf16.h"
#include "linear_dot.h"
#include "linear_finish.h"
#include "linear_gemm.h"
#include "threads.h"

namespace prejit {
namespace {

// From so many rows on, packing W and x pays for itself: dots reach 102 to 114 of a core's 118 GFLOP/s (Zen 4) at 20 rows
// as at 128, tiles 55 to 91 at 20, 95 to 107 at 128.
constexpr int64_t kFewestPackedRows = 128;

constexpr int64_t kDotRows = 32;      // Of one pass over the weights.
constexpr int64_t kDotOutputs = 128;  // Of a block, at most.

// Rows that are packed at once: few enough for L3, many enough to hide the packing of W, which each repeats.
constexpr int64_t kPackedBytes = 8 << 20;
constexpr int64_t kFewestRowsAtOnce = 256;
constexpr int64_t kMostRowsAtOnce = 1024;

// Of a block, at most: x and the sums stay in L2 together; the panels follow each other without waiting for memory.
constexpr int64_t kPanelsAtOnce = 4;
constexpr int64_t kTilesAtOnce = 20;

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kBfloat16 ? 2 : 1; }

template <typename Run>
void with_dtype(const Weights& weights, Run run) {
  switch (weights.dtype) {
    case Dtype::kFloat32: return run(static_cast<const float*>(weights.data));
    case Dtype::kBfloat16: return run(static_cast<const Bf16*>(weights.data));
    case Dtype::kInt8: return run(static_cast<const int8_t*>(weights.data));
  }
}

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// x is rounded to bfloat16 for weights of fewer bits than float32 has.
bool rounds(const Linear& p) { return p.weights.dtype != Dtype::kFloat32; }

// x rounded, in this thread's scratch. nullptr where memory is out.
const float* rounded_x(const Linear& p) {
  int64_t size = p.rows * p.inputs;
  float* to = static_cast<float*>(scratch((size + kLanes) * sizeof(float)));
  if (!to) return nullptr;
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, rounded(load(p.x + i)));
  if (int64_t rest = size - i) store_first(to + i, rounded(load_first(p.x + i, rest)), rest);
  return to;
}

bool linear_by_dots(const Linear& p) {
  const float* all = rounds(p) ? rounded_x(p) : p.x;
  if (!all) return false;
  int64_t size =
      dot_block_outputs(p.rows, p.inputs, p.outputs, bytes_of(p.weights.dtype), threads(), kDotOutputs);
  int64_t blocks = (p.outputs + size - 1) / size;
  for (int64_t row = 0; row < p.rows; row += kDotRows) {
    int64_t rows = least(p.rows - row, kDotRows);
    const float* x = all + row * p.inputs;
    parallel_for(blocks, [&](int64_t block) {
      alignas(64) float sums[kDotRows * kDotOutputs];
      alignas(64) float up_sums[kDotRows * kDotOutputs];
      int64_t first = block * size;
      int64_t count = least(p.outputs - first, size);
      auto multiply = [&](const Weights& weights, float* to) {
        with_dtype(weights, [&](auto* w) { dot_block(x, rows, w + first * p.inputs, p.inputs, count, to, kDotOutputs); });
      };
      multiply(p.weights, sums);
      if (p.gated) multiply(p.up, up_sums);
      for (int64_t r = 0; r < rows; ++r)
        finish(p, sums + r * kDotOutputs, up_sums + r * kDotOutputs, row + r, first, count);
    });
  }
  return true;
}

// Rows [first, first + rows) of p, packed in tiles.
struct PackedRows {
  int64_t first, rows;
  int height;           // Of a tile.
  int64_t tile_floats;  // From one tile to the next.
  const float* data;
};

// Some panels of W and some tiles of x.
struct Block {
  int64_t panel, panels;
  int64_t tile, tiles;
};

// One panel of W for some inputs, which is packed and multiplied at once.
struct Step {
  const Weights* weights;
  int64_t input, inputs;
  int64_t output, outputs;  // The first, and how many.
};

Step step_of(const Linear& p, const Block& block, int64_t index) {
  int64_t parts = (p.inputs + kInputsAtOnce - 1) / kInputsAtOnce;
  if (parts == 0) parts = 1;  // Sums of nothing are zeros.
  Step step;
  int64_t panel = block.panel + index % block.panels, part = index / block.panels % parts;
  step.weights = index < block.panels * parts ? &p.weights : &p.up;
  step.input = p.inputs * part / parts;
  step.inputs = p.inputs * (part + 1) / parts - step.input;
  step.output = panel * kPanel;
  step.outputs = least(p.outputs - step.output, kPanel);
  return step;
}

// Shares the fetching of a step's weights among the tiles of the step before it.
Fetch fetch_of(const Linear& p, const Step& step, int64_t tile, int64_t tiles) {
  int64_t bytes = bytes_of(step.weights->dtype);
  int64_t row = step.output + step.outputs * tile / tiles;
  const char* data = static_cast<const char*>(step.weights->data);
  return {data + (row * p.inputs + step.input) * bytes, p.inputs * bytes, (step.inputs * bytes + 63) / 64};
}

bool multiply_block(const Linear& p, const PackedRows& x, const Block& block) {
  int64_t stride = block.panels * kPanel;  // Of a row of sums.
  int64_t sums_floats = block.tiles * x.height * stride;
  int64_t panel_floats = kInputsAtOnce * kPanel;
  float* packed = static_cast<float*>(scratch((panel_floats + sums_floats * (p.gated ? 2 : 1)) * sizeof(float), 1));
  if (!packed) return false;
  float* sums = packed + panel_floats;
  int64_t parts = p.inputs > 0 ? (p.inputs + kInputsAtOnce - 1) / kInputsAtOnce : 1;
  int64_t steps = block.panels * parts * (p.gated ? 2 : 1);
  MultiplyTile multiply = multiply_tile_of<kTile>(x.height);
  for (int64_t s = 0; s < steps; ++s) {
    Step step = step_of(p, block, s), next = step_of(p, block, s + 1 < steps ? s + 1 : s);
    with_dtype(*step.weights, [&](auto* w) {
      pack_panel(w + step.output * p.inputs + step.input, step.outputs, step.inputs, p.inputs, packed);
    });
    float* to = (step.weights == &p.up ? sums + sums_floats : sums) + step.output - block.panel * kPanel;
    for (int64_t t = 0; t < block.tiles; ++t, to += x.height * stride)
      multiply(x.data + (block.tile + t) * x.tile_floats + step.input * x.height, packed, step.inputs, step.input == 0, to,
               stride, fetch_of(p, next, t, block.tiles));
  }
  int64_t row = block.tile * x.height, first = block.panel * kPanel;
  int64_t rows = least(x.rows - row, block.tiles * x.height), count = least(p.outputs - first, stride);
  for (int64_t r = 0; r < rows; ++r)
    finish(p, sums + r * stride, sums + sums_floats + r * stride, x.first + row + r, first, count);
  return true;
}

bool linear_by_tiles(const Linear& p) {
  int64_t most = kPackedBytes / (p.inputs * 4 + 1);
  most = most < kFewestRowsAtOnce ? kFewestRowsAtOnce : most > kMostRowsAtOnce ? kMostRowsAtOnce : most;
  int64_t parts = (p.rows + most - 1) / most;
  int64_t panels = (p.outputs + kPanel - 1) / kPanel;
  std::atomic<bool> has_memory{true};
  for (int64_t part = 0, row = 0; part < parts; ++part) {
    PackedRows x;
    x.first = row;
    x.rows = (p.rows - row) / (parts - part);
    row += x.rows;
    // Tiles of one height that waste the fewest rows.
    int64_t tiles = (x.rows + kTile - 1) / kTile;
    x.height = static_cast<int>((x.rows + tiles - 1) / tiles);
    x.tile_floats = packed_tile_floats(p.inputs, x.height);
    float* data = static_cast<float*>(scratch(tiles * x.tile_floats * sizeof(float)));
    if (!data) return false;
    x.data = data;
    parallel_for(tiles, [&](int64_t tile) {
      auto pack = rounds(p) ? pack_rows<true> : pack_rows<false>;
      pack(p.x + (x.first + tile * x.height) * p.inputs, least(x.rows - tile * x.height, x.height), p.inputs, x.height,
           data + tile * x.tile_floats);
    });
    // Blocks as large as caches allow, and a few for each thread.
    int64_t enough = 4 * threads();
    int64_t groups = (panels + kPanelsAtOnce - 1) / kPanelsAtOnce;
    int64_t splits = (tiles + kTilesAtOnce - 1) / kTilesAtOnce;
    if (groups * splits < enough) groups = least(panels, (enough + splits - 1) / splits);
    if (groups * splits < enough) splits = least((tiles + 3) / 4, (enough + groups - 1) / groups);
    parallel_for(groups * splits, [&](int64_t block) {
      int64_t group = block / splits, split = block % splits;
      int64_t panel = panels * group / groups, tile = tiles * split / splits;
      Block at = {panel, panels * (group + 1) / groups - panel, tile, tiles * (split + 1) / splits - tile};
      if (!multiply_block(p, x, at)) has_memory.store(false, std::memory_order_relaxed);
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace

bool linear(const Linear& product) {
  if (product.rows == 0 || product.outputs == 0) return true;
  Multiplier by = rounds(product) ? multiplier() : Multiplier::kFloat32;
  if (by != Multiplier::kFloat32 && product.rows >= fewest_packed_rows(by)) return linear_by_pairs(product, by);
  return product.rows < kFewestPackedRows ? linear_by_dots(product) : linear_by_tiles(product);
}

}  // namespace prejit
