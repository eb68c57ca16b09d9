// Products of linear_int4.h with x in floats. A source that includes this defines before
//
//   PREJIT_INT4          the attributes of functions, with the instructions that they may use
//   Element              of x as it is packed
//   pack                 rounds x
//   Unpacking            what is in registers for a whole tile; its `scale` loads scales
//   add<rows, vectors>   adds the products of 8 inputs
//
// in an unnamed namespace, as linear_int4_tiles.h needs it.

struct Packed {
  static constexpr bool kTakesZeros = false;
  const Element* x;
  int64_t inputs;

  // Elements are packed in whole vectors.
  static int64_t bytes(int64_t rows, int64_t inputs) { return (rows * inputs + 64) * sizeof(Element); }
  Packed(const float* from, int64_t rows, int64_t inputs, void* memory)
      : x(static_cast<Element*>(memory)), inputs(inputs) {
    int64_t count = rows * inputs;
    parallel_for(parts_of(count, kPackedAtOnce), [&](int64_t part) {
      int64_t at = part * kPackedAtOnce;
      pack(from + at, least(count - at, kPackedAtOnce), static_cast<Element*>(memory) + at);
    });
  }
  Packed behind(int64_t rows) const {
    Packed rest = *this;
    rest.x += rows * inputs;
    return rest;
  }
};

// sums[row, lane] = x[row] . w[lane] for some rows and `vectors` vectors of the 16 outputs of a tile.
template <int rows, int vectors, bool>
PREJIT_INT4 void multiply_lanes(const Packed& packed, const uint32_t* words, const uint16_t* scales, int64_t group,
                                float* sums) {
  const Unpacking unpacking;
  const Element* x = packed.x;
  const int64_t inputs = packed.inputs, stride = inputs;
  Floats total[rows][vectors] = {};
  for (int64_t k = 0, end = group; k < inputs; k += kInt4Group) {
    if (k == end) scales += kInt4Tile, end += group;
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
