// Products of linear_int4.h with x in bytes. A source that includes this defines before
//
//   PREJIT_INT4   the attributes of functions, with the instructions that they may use
//   Packed        with x in bytes, and for 32 inputs of a row a scale and a sum
//   Sums          of 32 products for each lane
//   add           adds the products of four bytes: 0 .. 15 of weights, and x
//   total_of      converts sums to floats
//
// in an unnamed namespace, as linear_int4_tiles.h needs it.

template <int rows, int vectors, bool zeros>
PREJIT_INT4 void multiply_lanes(const Packed& packed, const uint32_t* words, const uint16_t* scales, int64_t group,
                                float* sums) {
  const int8_t* x = packed.x;
  const int64_t inputs = packed.inputs;
  Floats total[rows][vectors] = {};
  for (int64_t k = 0, end = group; k < inputs; k += kInt4Group) {
    if (k == end) scales += zeros ? 2 * kInt4Tile : kInt4Tile, end += group;
    Sums part[rows][vectors] = {};
#pragma GCC unroll 4
    for (int step = 0; step < 4; ++step, words += kInt4Tile) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kInt4AheadBytes, 0, 2);
      Bits low[vectors], high[vectors];
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        Bits word = load_as<Bits>(words + v * kLanes) ^ 0x88888888;
        low[v] = word & 0x0F0F0F0F, high[v] = word >> 4 & 0x0F0F0F0F;
      }
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        const int8_t* of_row = x + r * inputs + k + step * kInt4InWord;
        Bits first = Bits{} + load_as<uint32_t>(of_row), second = Bits{} + load_as<uint32_t>(of_row + 4);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v)
          part[r][v] = add(add(part[r][v], low[v], first), high[v], second);
      }
    }
    if (k % (2 * kInt4Group) == 0) __builtin_prefetch(reinterpret_cast<const char*>(scales) + kInt4AheadBytes / 8, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      Floats scale = load_halves(scales + v * kLanes), less = splat(8);
      if constexpr (zeros) less = less + load_halves(scales + kInt4Tile + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < rows; ++r) {
        int64_t at = (r * inputs + k) / kInt4Group;
        Floats sum = multiply_add(splat(packed.sums[at]), less, total_of(part[r][v]));
        total[r][v] = multiply_add(sum * splat(packed.scales[at]), scale, total[r][v]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(sums + r * kInt4Tile + v * kLanes, total[r][v]);
}

#include "linear_int4_tiles.h"
