// Products with weights in four bits, for any number of rows, on every level.
//
//   words   [N / 16][K / 8][16] of 32 bits   8 inputs of one output, 16 outputs beside each other
//   scales  [N / 16][groups][16] float16     one for each group of inputs of an output, which is a multiple of 32,
//           [N / 16][groups][32] float16     or the same, then the zero point of each group
//
//   bits of a word    28..31  24..27  20..23  16..19  12..15   8..11    4..7    0..3
//   input beside 8 n       7       5       3       1       6       4       2       0
//
// Integers are -8 .. 7, in two's complement; a value is (integer - zero point) * scale. models/layers/int4_words.py writes
// them. With MXFP4 four bits are a sign, two of an exponent and one of a mantissa (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6), and scales
// are powers of two in bfloat16.
//
// Lanes are outputs: x is broadcast, no sum crosses lanes, and a tile of 16 outputs is one stream of memory. The sum
// of 32 inputs is multiplied with the scale and added to the sum of the inputs before. The zero point is multiplied with
// the sum of these x, which a row has once, and is taken from the products. So a row has one order of sums, whatever the
// other rows are and how many.
//
// Of integers 32 x are rounded to int8 with one scale, and their sum of products is exact. Of floats x is rounded to bfloat16,
// and 32 inputs have two sums in float32.
#pragma once

#include "linear.h"

namespace prejit {

constexpr int64_t kInt4Group = 32;  // Inputs that are summed before a scale.
constexpr int64_t kInt4Tile = 16;
constexpr int64_t kInt4InWord = 8;

// How far ahead words are fetched: as in linear_dot.h, loads alone do not look far enough ahead.
constexpr int64_t kInt4AheadBytes = 4096;
// Rows in registers.
constexpr int kInt4Rows = kRegisters == 32 ? 12 : 4;
constexpr int kInt4Vectors = kInt4Tile / kLanes;
// The number of rows from which AMX's tiles are used. Counted, not measured (linear_int4_amx.cc): 1 to 16 rows take some 40
// cycles for 32 inputs of 16 outputs, each row takes 6 by AVX-512's VNNI.
constexpr int64_t kFewestInt4TileRows = 16;
// Maximum bytes of a part of x, which stays in L2 while weights pass.
constexpr int64_t kInt4RowBytes = 512 << 10;
// Numbers of x that a thread packs at once: whole groups.
constexpr int64_t kPackedAtOnce = 16 << 10;
// Maximum bytes of words of a block.
constexpr int64_t kInt4BlockBytes = 256 << 10;

// Does what linear() does for int4 weights. Returns false if memory is exhausted.
bool linear_int4(const Linear& p);

// The same for floats by AVX-512 BF16 (linear_multiplier.h); false without it.
bool linear_int4_by_bf16(const Linear& p);

// The same for integers.
bool linear_int4_by_integers(const Linear& p);

// The same for integers by AMX's tiles (byte_tiles); false without them.
bool linear_int4_by_tiles(const Linear& p);

}  // namespace prejit
