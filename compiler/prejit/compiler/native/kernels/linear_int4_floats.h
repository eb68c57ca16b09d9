// Products of linear_int4.h with x in floats. A source that includes this defines before
//
//   PREJIT_INT4          the attributes of functions, with the instructions that they may use
//   Element              of x as it is packed
//   pack                 rounds x
//   load_element         loads x as it is packed
//   Unpacking            what is in registers for a whole tile; its `scale` loads scales
//   add<rows, vectors>   adds the products of 8 inputs
//
// in an unnamed namespace, as linear_int4_tiles.h needs it.

// Writes minus the sums of 32 elements each, in one order.
void sum_groups(const Element* x, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kInt4Group) {
    Floats sums = {};
    for (int64_t lane = 0; lane < kInt4Group; lane += kLanes) sums = sums + load_element(x + i + lane);
    to[i / kInt4Group] = -sum(sums);
  }
}

struct Packed {
  const Element* x;
  const float* sums;  // [row, inputs / 32]: minus the sums of 32 x, if there are zero points.
  int64_t inputs;

  // Elements are packed in whole vectors.
  static int64_t elements(int64_t rows, int64_t inputs) { return rows * inputs + 64; }
  static int64_t bytes(int64_t rows, int64_t inputs) {
    return elements(rows, inputs) * sizeof(Element) + rows * inputs / kInt4Group * sizeof(float);
  }
  Packed(const float* from, int64_t rows, int64_t inputs, bool has_zeros, void* memory) : inputs(inputs) {
    Element* packed = static_cast<Element*>(memory);
    float* of_groups = reinterpret_cast<float*>(packed + elements(rows, inputs));
    pack(from, rows * inputs, packed);
    if (has_zeros) sum_groups(packed, rows * inputs, of_groups);
    x = packed, sums = of_groups;
  }
  Packed behind(int64_t rows) const {
    Packed rest = *this;
    rest.x += rows * inputs, rest.sums += rows * inputs / kInt4Group;
    return rest;
  }
};

// sums[row, lane] = x[row] . w[lane] for some rows and `vectors` vectors of the 16 outputs of a tile.
template <int rows, int vectors, bool zeros>
PREJIT_INT4 void multiply_lanes(const Packed& packed, const uint32_t* words, const uint16_t* scales, int64_t group,
                                float* sums) {
  const Unpacking unpacking;
  const Element* x = packed.x;
  const int64_t inputs = packed.inputs, stride = inputs;
  Floats total[rows][vectors] = {};
  for (int64_t k = 0, end = group; k < inputs; k += kInt4Group) {
    if (k == end) scales += zeros ? 2 * kInt4Tile : kInt4Tile, end += group;
    Floats part[2][rows][vectors] = {};
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step, words += kInt4Tile) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kInt4AheadBytes, 0, 2);
      add<rows, vectors>(x + k + step * kInt4InWord, stride, words, unpacking, part);
    }
    if (k % (2 * kInt4Group) == 0) __builtin_prefetch(reinterpret_cast<const char*>(scales) + kInt4AheadBytes / 8, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Floats scale = unpacking.scale(scales + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        Floats both = part[0][r][v] + part[1][r][v];
        if constexpr (zeros) {
          Floats zero = load_halves(scales + kInt4Tile + v * kLanes);
          both = multiply_add(splat(packed.sums[(r * inputs + k) / kInt4Group]), zero, both);
        }
        total[r][v] = multiply_add(both, scale, total[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(sums + r * kInt4Tile + v * kLanes, total[r][v]);
}

#include "linear_int4_tiles.h"
