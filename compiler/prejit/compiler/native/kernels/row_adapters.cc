#include "row_adapters.h"

#include "simd.h"
#include "threads.h"

namespace prejit {
namespace {

// Positions that share the loads of A and B, and ranks and vectors of outputs that are summed at once, in registers.
constexpr int kTokens = 4;
constexpr int kRanks = kRegisters == 32 ? 4 : 2;
constexpr int kVectors = kRegisters == 32 ? 4 : 2;
// Tasks for each thread, and outputs of the smallest task.
constexpr int64_t kTasksOfThread = 4;
constexpr int64_t kLeastOutputs = 256;

// Positions of one adapter, by their places in the order of the rows' slots.
struct Tile {
  int64_t first;
  int32_t tokens, slot;
};

struct Tiles {
  int32_t* row;  // [rows] in the order of their slots: those of one adapter share its loads.
  Tile* tile;
  int64_t count = 0;
  float* inner;  // x A^T, [rows * positions, rank] in that order.
};

bool arrange(const RowAdapters& c, Tiles& tiles) {
  int64_t tokens = c.rows * c.positions;
  size_t tile_bytes = tokens * sizeof(Tile), inner_bytes = tokens * c.rank * sizeof(float);
  char* memory = static_cast<char*>(scratch(tile_bytes + inner_bytes + c.rows * sizeof(int32_t)));
  if (!memory) return false;
  tiles.tile = reinterpret_cast<Tile*>(memory);
  tiles.inner = reinterpret_cast<float*>(memory + tile_bytes);
  tiles.row = reinterpret_cast<int32_t*>(memory + tile_bytes + inner_bytes);
  for (int64_t i = 0; i < c.rows; ++i) {
    int64_t at = i;
    for (; at > 0 && c.slot[tiles.row[at - 1]] > c.slot[i]; --at) tiles.row[at] = tiles.row[at - 1];
    tiles.row[at] = static_cast<int32_t>(i);
  }
  for (int64_t i = 0, end; i < c.rows; i = end) {
    int32_t slot = c.slot[tiles.row[i]];
    for (end = i + 1; end < c.rows && c.slot[tiles.row[end]] == slot;) ++end;
    if (slot == 0 && c.activation == Activation::kNone) continue;
    for (int64_t first = i * c.positions; first < end * c.positions; first += kTokens)
      tiles.tile[tiles.count++] = {first, static_cast<int32_t>(least(end * c.positions - first, kTokens)), slot};
  }
  return true;
}

// Writes the inner products of some positions and some ranks.
template <int tokens, int ranks>
void multiply_ranks(const float* const* x, const float* a, int64_t inputs, float* to, int64_t stride) {
  Floats sums[tokens][ranks] = {};
  auto add = [&](int64_t i, auto load_some) {
    Floats v[tokens];
    for (int t = 0; t < tokens; ++t) v[t] = load_some(x[t] + i);
    for (int r = 0; r < ranks; ++r) {
      Floats w = load_some(a + r * inputs + i);
      for (int t = 0; t < tokens; ++t) sums[t][r] = multiply_add(w, v[t], sums[t][r]);
    }
  };
  int64_t i = 0;
  for (; i + kLanes <= inputs; i += kLanes) add(i, [](const float* from) { return load(from); });
  if (int64_t rest = inputs - i)
    add(i, [rest](const float* from) { return load_first(from, rest); });
  for (int t = 0; t < tokens; ++t)
    for (int r = 0; r < ranks; ++r) to[t * stride + r] = sum(sums[t][r]);
}

// Adds the change to some vectors of outputs of some positions; load_some and store_some know how much of a vector.
template <int tokens, int vectors, typename Load, typename Store>
PREJIT_INLINE void add_outputs(const RowAdapters& c, const float* inner, const float* b, float* const* y,
                               Load load_some, Store store_some) {
  Floats sums[tokens][vectors] = {};
  if (b)
    for (int64_t r = 0; r < c.rank; ++r) {
      Floats w[vectors];
      for (int v = 0; v < vectors; ++v) w[v] = load_some(b + r * c.outputs + v * kLanes);
      for (int t = 0; t < tokens; ++t)
        for (int v = 0; v < vectors; ++v)
          sums[t][v] = multiply_add(splat(inner[t * c.rank + r]), w[v], sums[t][v]);
    }
  for (int t = 0; t < tokens; ++t)
    for (int v = 0; v < vectors; ++v) {
      Floats before = load_some(y[t] + v * kLanes);
      store_some(y[t] + v * kLanes, apply(c.activation, b ? before + sums[t][v] : before));
    }
}

template <int tokens>
struct TileOf {
  const RowAdapters& c;
  const Tiles& tiles;
  const Tile& tile;

  int64_t token(int64_t t) const {
    int64_t at = tile.first + t;
    return tiles.row[at / c.positions] * c.positions + at % c.positions;
  }
  float* inner() const { return tiles.inner + tile.first * c.rank; }

  void multiply(int64_t first, int64_t end) const {
    if (tile.slot == 0) return;
    const float* x[tokens];
    for (int t = 0; t < tokens; ++t) x[t] = c.x + token(t) * c.inputs;
    const float* a = c.a + (tile.slot - 1) * c.a_stride;
    int64_t r = first;
    for (; r + kRanks <= end; r += kRanks)
      multiply_ranks<tokens, kRanks>(x, a + r * c.inputs, c.inputs, inner() + r, c.rank);
    for (; r < end; ++r) multiply_ranks<tokens, 1>(x, a + r * c.inputs, c.inputs, inner() + r, c.rank);
  }

  void add(int64_t first, int64_t end) const {
    float* y[tokens];
    for (int t = 0; t < tokens; ++t) y[t] = c.y + token(t) * c.outputs + first;
    const float* b = tile.slot ? c.b + (tile.slot - 1) * c.b_stride + first : nullptr;
    auto move = [&](int64_t by) {
      for (int t = 0; t < tokens; ++t) y[t] += by;
      if (b) b += by;
      first += by;
    };
    auto load_all = [](const float* from) { return load(from); };
    auto store_all = [](float* to, Floats v) { store(to, v); };
    for (; first + kVectors * kLanes <= end; move(kVectors * kLanes))
      add_outputs<tokens, kVectors>(c, inner(), b, y, load_all, store_all);
    for (; first + kLanes <= end; move(kLanes)) add_outputs<tokens, 1>(c, inner(), b, y, load_all, store_all);
    if (int64_t rest = end - first)
      add_outputs<tokens, 1>(
          c, inner(), b, y, [rest](const float* from) { return load_first(from, rest); },
          [rest](float* to, Floats v) { store_first(to, v, rest); });
  }
};

template <typename Run>
void with_tile(const RowAdapters& c, const Tiles& tiles, int64_t index, const Run& run) {
  const Tile& tile = tiles.tile[index];
  switch (tile.tokens) {
    case 1: return run(TileOf<1>{c, tiles, tile});
    case 2: return run(TileOf<2>{c, tiles, tile});
    case 3: return run(TileOf<3>{c, tiles, tile});
    default: return run(TileOf<kTokens>{c, tiles, tile});
  }
}

// Calls each(tile, first, end) on the threads, for parts of `whole` that are at least `smallest` and multiples of it.
template <typename Each>
void in_parts(int64_t tiles, int64_t whole, int64_t smallest, const Each& each) {
  int64_t wanted = (kTasksOfThread * threads() + tiles - 1) / tiles;
  int64_t size = (whole + wanted - 1) / wanted;
  size = (size + smallest - 1) / smallest * smallest;
  int64_t parts = (whole + size - 1) / size;
  parallel_for(tiles * parts, [&](int64_t task) {
    int64_t first = task % parts * size;
    each(task / parts, first, least(first + size, whole));
  });
}

}  // namespace

bool row_adapters(const RowAdapters& c) {
  if (c.rows * c.positions == 0 || c.outputs == 0) return true;
  Tiles tiles;
  if (!arrange(c, tiles)) return false;
  if (tiles.count == 0) return true;
  if (c.rank)
    in_parts(tiles.count, c.rank, kRanks, [&](int64_t tile, int64_t first, int64_t end) {
      with_tile(c, tiles, tile, [&](const auto& each) { each.multiply(first, end); });
    });
  in_parts(tiles.count, c.outputs, kLeastOutputs, [&](int64_t tile, int64_t first, int64_t end) {
    with_tile(c, tiles, tile, [&](const auto& each) { each.add(first, end); });
  });
  return true;
}

}  // namespace prejit
