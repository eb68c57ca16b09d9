#include "linear.h"

#include <atomic>

#include "linear_amx.h"
#include "linear_dot.h"
#include "linear_dot_bf16.h"
#include "linear_finish.h"
#include "linear_gemm.h"
#include "linear_int4.h"
#include "linear_integers.h"
#include "linear_multiplier.h"
#include "linear_outputs_bf16.h"
#include "threads.h"

namespace prejit {
namespace {

// Panels compute whole vectors of rows. On a core of Sapphire Rapids (GFLOP/s with 384 inputs, weights in L2 and weights
// in memory) they reach 118 and 70 at 16 rows, 150 and 107 at 32; dots reach 107 and 92, 112 and 105. Dots add in
// another order, which is the same for any number of rows, and greedy tokens must not depend on the batch. So decode,
// with a few positions of each sequence, uses dots until it has very many rows.
constexpr int64_t kFewestPanelPositions = 32;
constexpr int64_t kManyRows = 128;

int64_t usual_rows(const Linear& p) { return p.usual_rows ? p.usual_rows : p.rows; }

bool fills_panels(const Linear& p) {
  int64_t computed = (p.positions + kLanes - 1) / kLanes * kLanes;
  return usual_rows(p) >= kManyRows || (p.positions >= kFewestPanelPositions && computed - p.positions <= computed / 8);
}

constexpr int64_t kDotRows = 32;      // In one pass over the weights.
constexpr int64_t kDotOutputs = 128;  // Maximum of a block.

// Rows that are packed at once: few enough for L3, and enough to hide the copying of W, which each pass repeats.
constexpr int64_t kPackedBytes = 8 << 20;
constexpr int64_t kFewestRowsAtOnce = 256;
constexpr int64_t kMostRowsAtOnce = 1024;

// Maximum of a block: the panels' inputs and the sums stay in L2. Outputs are whole vectors and whole strips.
constexpr int64_t kPanelsAtOnce = 16;
constexpr int64_t kGroup = 48;
constexpr int64_t kSumsAtOnce = kPanelsAtOnce * 96;  // Panels times outputs.
static_assert(kGroup % kLanes == 0 && kGroup % kStrip == 0);

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : dtype == Dtype::kBfloat16 ? 2 : 1; }

template <typename Run>
void with_dtype(const Weights& weights, Run run) {
  switch (weights.dtype) {
    case Dtype::kFloat32: return run(static_cast<const float*>(weights.data));
    case Dtype::kBfloat16: return run(static_cast<const Bf16*>(weights.data));
    case Dtype::kInt8: return run(static_cast<const int8_t*>(weights.data));
    case Dtype::kInt4: return;  // linear_int4.h
  }
}

// x is rounded to bfloat16 for weights of fewer bits than float32 has.
bool rounds(const Linear& p) { return p.weights.dtype != Dtype::kFloat32; }

// Returns x rounded, in this thread's scratch, or nullptr if memory is exhausted.
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
  int64_t size = dot_block_outputs(dot_streams_of<FloatDots<float>>(p.rows), p.inputs * bytes_of(p.weights.dtype), p.outputs,
                                   threads(), kDotOutputs);
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
        with_dtype(weights, [&](auto* w) {
          using W = std::remove_const_t<std::remove_pointer_t<decltype(w)>>;
          dot_block<FloatDots<W>>(x, rows, p.inputs, w + first * p.inputs, p.inputs, count, to, kDotOutputs);
        });
      };
      multiply(p.weights, sums);
      if (p.gated) multiply(p.up, up_sums);
      for (int64_t r = 0; r < rows; ++r)
        finish(p, sums + r * kDotOutputs, up_sums + r * kDotOutputs, row + r, first, count);
    });
  }
  return true;
}

// Rows [first, first + rows) of p, packed in panels.
struct PackedRows {
  int64_t first, rows, inputs;
  float* data;

  int64_t panels() const { return (rows + kPanelRows - 1) / kPanelRows; }
  // The last panel has one vector where that is enough.
  int lanes(int64_t panel) const { return rows - panel * kPanelRows <= kLanes ? kLanes : kPanelRows; }
  float* panel(int64_t panel) const { return data + panel * kPanelRows * inputs; }
};

// Some panels of x and some outputs.
struct Block {
  int64_t panel, panels;
  int64_t output, outputs;
};

// A strip of W for some inputs, which is copied and multiplied at once.
struct Step {
  const Weights* weights;
  int64_t input, inputs;
  int64_t output, outputs;  // The first, and how many.
};

Step step_of(const Linear& p, const Block& block, int64_t strips, int64_t parts, int64_t index) {
  Step step;
  int64_t strip = index % strips, part = index / strips % parts;
  step.weights = index < strips * parts ? &p.weights : &p.up;
  step.input = p.inputs * part / parts;
  step.inputs = p.inputs * (part + 1) / parts - step.input;
  step.output = block.output + strip * kStrip;
  step.outputs = least(block.output + block.outputs - step.output, kStrip);
  return step;
}

// Where a step's weights can be multiplied as they lie: outputs a multiple of a page apart share a few sets of L1.
bool is_in_place(const Step& step, int64_t inputs) {
  return step.weights->dtype == Dtype::kFloat32 && step.outputs == kStrip && inputs * 4 % 4096 != 0;
}

// Shares the fetching of a step's weights among the panels of the step before it.
Fetch fetch_of(const Linear& p, const Step& step, int64_t panel, int64_t panels) {
  int64_t bytes = bytes_of(step.weights->dtype);
  int64_t lines = (step.inputs * bytes + 63) / 64, first = lines * panel / panels;  // Of each output.
  const char* data = static_cast<const char*>(step.weights->data);
  return {data + (step.output * p.inputs + step.input) * bytes + first * 64, p.inputs * bytes, step.outputs,
          step.outputs * (lines * (panel + 1) / panels - first)};
}

// Returns the lines of y that a panel writes: stores to memory that is not in L2 would wait for it.
Fetch fetch_y(const Linear& p, int64_t row, int64_t rows, const Block& block) {
  return {reinterpret_cast<const char*>(p.y + row * p.outputs + block.output), p.outputs * 4, rows,
          rows * ((block.outputs * 4 + 63) / 64)};
}

bool multiply_block(const Linear& p, const PackedRows& x, const Block& block) {
  int64_t strips = (block.outputs + kStrip - 1) / kStrip;
  int64_t parts = p.inputs > 0 ? (p.inputs + kInputsAtOnce - 1) / kInputsAtOnce : 1;  // Without inputs the sums are zeros.
  int64_t steps = strips * parts * (p.gated ? 2 : 1);
  int64_t stride = (strips * kStrip + kLanes - 1) / kLanes * kLanes;  // Of a row of transposed sums.
  int64_t panel_sums = stride * kPanelRows, sums_floats = block.panels * panel_sums;
  int64_t floats = kStrip * kStripStride + sums_floats * (p.gated ? 2 : 1) + panel_sums * 2;
  float* strip = static_cast<float*>(scratch(floats * sizeof(float), 1));
  if (!strip) return false;
  float* sums = strip + kStrip * kStripStride;
  for (int64_t s = 0; s < steps; ++s) {
    Step step = step_of(p, block, strips, parts, s), next = step_of(p, block, strips, parts, s + 1 < steps ? s + 1 : s);
    const float* w = strip;
    int64_t w_stride = kStripStride;
    if (is_in_place(step, p.inputs)) {
      w = static_cast<const float*>(step.weights->data) + step.output * p.inputs + step.input;
      w_stride = p.inputs;
    } else {
      with_dtype(*step.weights, [&](auto* from) {
        copy_strip(from + step.output * p.inputs + step.input, step.outputs, step.inputs, p.inputs, strip);
      });
    }
    float* to = step.weights == &p.up ? sums + sums_floats : sums;
    for (int64_t i = 0; i < block.panels; ++i, to += panel_sums) {
      int lanes = x.lanes(block.panel + i);
      int64_t row = (block.panel + i) * kPanelRows, rows = least(x.rows - row, lanes);
      Fetch fetch = s + 1 == steps ? fetch_y(p, x.first + row, rows, block) : fetch_of(p, next, i, block.panels);
      auto multiply = lanes == kLanes ? multiply_strip<1> : multiply_strip<2>;
      multiply(x.panel(block.panel + i) + step.input * lanes, w, w_stride, step.inputs, step.input == 0,
               to + (step.output - block.output) * lanes, fetch);
    }
  }
  float* by_row = sums + sums_floats * (p.gated ? 2 : 1);
  for (int64_t i = 0; i < block.panels; ++i) {
    int64_t row = (block.panel + i) * kPanelRows;
    int lanes = x.lanes(block.panel + i);
    unpack_sums(sums + i * panel_sums, lanes, stride, by_row, stride);
    if (p.gated) unpack_sums(sums + sums_floats + i * panel_sums, lanes, stride, by_row + panel_sums, stride);
    for (int64_t r = 0; r < least(x.rows - row, lanes); ++r)
      finish(p, by_row + r * stride, by_row + panel_sums + r * stride, x.first + row + r, block.output, block.outputs);
  }
  return true;
}

bool linear_by_panels(const Linear& p) {
  int64_t most = kPackedBytes / (p.inputs * 4 + 1);
  most = most < kFewestRowsAtOnce ? kFewestRowsAtOnce : most > kMostRowsAtOnce ? kMostRowsAtOnce : most;
  std::atomic<bool> has_memory{true};
  for (int64_t row = 0; row < p.rows; row += most) {
    PackedRows x = {row, least(p.rows - row, most), p.inputs, nullptr};
    int64_t panels = x.panels();
    x.data = static_cast<float*>(scratch(panels * kPanelRows * p.inputs * sizeof(float) + 64));
    if (!x.data) return false;
    parallel_for(panels, [&](int64_t panel) {
      int64_t first = panel * kPanelRows;
      auto pack = rounds(p) ? pack_panel<true> : pack_panel<false>;
      pack(p.x + (row + first) * p.inputs, least(x.rows - first, kPanelRows), p.inputs, x.lanes(panel), x.panel(panel));
    });
    // Blocks are as large as caches allow, with a few for each thread.
    int64_t enough = 4 * threads();
    int64_t splits = (panels + kPanelsAtOnce - 1) / kPanelsAtOnce;
    int64_t wanted = splits < enough ? (enough + splits - 1) / splits : 1;  // Groups of outputs.
    int64_t outputs = least(p.outputs / wanted, kSumsAtOnce / least(panels, kPanelsAtOnce)) / kGroup * kGroup;
    if (outputs < kGroup) outputs = kGroup;
    int64_t groups = (p.outputs + outputs - 1) / outputs;
    if (groups * splits < enough) splits = least(panels, (enough + groups - 1) / groups);
    parallel_for(groups * splits, [&](int64_t block) {
      // Consecutive blocks share the panels.
      int64_t split = block / groups, first = block % groups * outputs, panel = panels * split / splits;
      Block at = {panel, panels * (split + 1) / splits - panel, first, least(p.outputs - first, outputs)};
      if (!multiply_block(p, x, at)) has_memory.store(false, std::memory_order_relaxed);
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace

bool linear(const Linear& product) {
  if (product.rows == 0 || product.outputs == 0) return true;
  if (product.weights.dtype == Dtype::kInt4) return linear_int4(product);
  if (product.weights.dtype == Dtype::kInt8 && product.inputs <= kMostIntegerInputs) return linear_by_fixed_point(product);
  Multiplier by = product.weights.dtype == Dtype::kBfloat16 ? multiplier() : Multiplier::kFloat32;
  if (by == Multiplier::kAvx512Bf16) return product.many_rows ? linear_by_bf16_outputs(product) : linear_by_bf16_dots(product);
  if (by == Multiplier::kAmx && usual_rows(product) >= kFewestTileRows) return linear_by_amx(product);
  return fills_panels(product) ? linear_by_panels(product) : linear_by_dots(product);
}

}  // namespace prejit
