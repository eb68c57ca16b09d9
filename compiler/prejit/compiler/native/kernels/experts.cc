#include "experts.h"

#include <cstring>

#include <atomic>

#include "linear_int4.h"
#include "threads.h"

namespace prejit {
namespace {

// Tasks for each thread, and outputs of the smallest task: whole tiles of int4, and streams of the others.
constexpr int64_t kTasksOfThread = 8;
constexpr int64_t kLeastOutputs = 128;
// Maximum rows that a task gathers at a time.
constexpr int64_t kRowsAtOnce = 256;
// Buffers that no Linear uses.
constexpr int kOrderSlot = 2, kRowsSlot = 3;

// Returns W without its first outputs, which are whole tiles of int4.
Weights behind(Weights w, int64_t outputs, int64_t inputs) {
  int64_t elements = outputs * inputs, bytes = elements;
  switch (w.dtype) {
    case Dtype::kFloat32: bytes = elements * 4; break;
    case Dtype::kBfloat16: bytes = elements * 2; break;
    case Dtype::kInt8: break;
    case Dtype::kInt4: bytes = elements / 2; break;
  }
  w.data = static_cast<const char*>(w.data) + bytes;
  if (w.scale) w.scale += outputs;
  if (w.group_scales) w.group_scales += elements / kInt4Group;
  return w;
}

// The pairs of each expert that has some, in their order.
struct Order {
  int32_t* first;   // [E + 1] the place of an expert's first pair
  int32_t* pair;    // [pairs]
  int32_t* active;  // [E] the experts that have pairs
  int64_t count = 0;
};

bool put_in_order(const ExpertProducts& p, Order& order) {
  size_t size = 2 * p.experts + 1 + p.pairs;
  order.first = static_cast<int32_t*>(scratch(size * sizeof(int32_t), kOrderSlot));
  if (!order.first) return false;
  order.pair = order.first + p.experts + 1;
  order.active = order.pair + p.pairs;
  for (int64_t e = 0; e <= p.experts; ++e) order.first[e] = 0;
  for (int64_t i = 0; i < p.pairs; ++i) ++order.first[p.expert[i]];
  for (int64_t e = 0, sum = 0; e <= p.experts; ++e) {
    int32_t rows = order.first[e];
    order.first[e] = static_cast<int32_t>(sum);
    if (rows) order.active[order.count++] = static_cast<int32_t>(e);
    sum += rows;
  }
  // `first` moves to each expert's end, which is where the next one begins.
  for (int64_t i = 0; i < p.pairs; ++i) order.pair[order.first[p.expert[i]]++] = static_cast<int32_t>(i);
  for (int64_t e = p.experts; e > 0; --e) order.first[e] = order.first[e - 1];
  order.first[0] = 0;
  return true;
}

// Computes some outputs of some pairs, whose Linear has all but rows.
bool multiply(const ExpertProducts& p, Linear product, const int32_t* pair, int64_t rows, int64_t first) {
  product.rows = rows;
  if (rows == 1) {
    product.x = p.each.x + *pair / p.row_pairs * p.each.inputs;
    product.y = p.each.y + *pair * p.each.outputs + first;
    return linear(product);
  }
  int64_t inputs = product.inputs, outputs = product.outputs;
  float* x = static_cast<float*>(scratch(rows * (inputs + outputs) * sizeof(float), kRowsSlot));
  if (!x) return false;
  product.x = x, product.y = x + rows * inputs;
  for (int64_t r = 0; r < rows; ++r)
    memcpy(x + r * inputs, p.each.x + pair[r] / p.row_pairs * inputs, inputs * sizeof(float));
  if (!linear(product)) return false;
  for (int64_t r = 0; r < rows; ++r)
    memcpy(p.each.y + pair[r] * p.each.outputs + first, product.y + r * outputs, outputs * sizeof(float));
  return true;
}

}  // namespace

bool expert_products(const ExpertProducts& p) {
  if (p.pairs == 0 || p.each.outputs == 0) return true;
  Order order;
  if (!put_in_order(p, order)) return false;
  int64_t outputs = p.each.outputs, tile = p.each.weights.dtype == Dtype::kInt4 ? kInt4Tile : 1;
  int64_t of_expert = (p.each.gated ? 2 * outputs : outputs) + (tile - 1);
  of_expert = of_expert / tile * tile;
  int64_t parts = least((kTasksOfThread * threads() + order.count - 1) / order.count,
                        (outputs + kLeastOutputs - 1) / kLeastOutputs);
  int64_t size = (outputs + parts - 1) / parts;
  size = (size + kInt4Tile - 1) / kInt4Tile * kInt4Tile;
  parts = (outputs + size - 1) / size;
  std::atomic<bool> has_memory{true};
  // The products within a task run on its thread alone, unless it is the only one.
  parallel_for(order.count * parts, [&](int64_t task) {
    int64_t expert = order.active[task / parts], first = task % parts * size;
    Linear product = p.each;
    product.outputs = least(outputs - first, size);
    product.usual_rows = p.pairs < p.experts ? 1 : p.pairs / p.experts;
    // Biases, unlike matrices, have no outputs that fill up a tile.
    int64_t bias = expert * (p.each.gated ? 2 * outputs : outputs) + first;
    product.weights = behind(p.each.weights, expert * of_expert + first, product.inputs);
    if (product.weights.bias) product.weights.bias += bias;
    if (product.gated) {
      product.up = behind(p.each.weights, expert * of_expert + outputs + first, product.inputs);
      if (product.up.bias) product.up.bias += bias + outputs;
    }
    int32_t begin = order.first[expert], end = order.first[expert + 1];
    for (int64_t at = begin; at < end; at += kRowsAtOnce)
      if (!multiply(p, product, order.pair + at, least(end - at, kRowsAtOnce), first))
        has_memory.store(false, std::memory_order_relaxed);
  });
  return has_memory.load(std::memory_order_relaxed);
}

}  // namespace prejit
