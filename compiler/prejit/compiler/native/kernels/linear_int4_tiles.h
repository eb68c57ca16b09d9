// The loops of linear_int4.h over rows, tiles and groups. A source that includes this defines before
//
//   PREJIT_INT4          the attributes of functions, with the instructions that they may use
//   Element              of x as it is packed
//   pack                 rounds x
//   Unpacking            what is in registers for a whole tile; its `scale` loads scales
//   add<rows, vectors>   adds the products of 8 inputs
//
// in an unnamed namespace, as this is compiled once for each way to multiply and each kind of values.

// How far ahead words are fetched: as in linear_dot.h, loads alone do not look far enough ahead.
constexpr int64_t kInt4AheadBytes = 4096;
// Rows in registers.
constexpr int kInt4Rows = kRegisters == 32 ? 12 : 4;
constexpr int kInt4Vectors = kInt4Tile / kLanes;
// Maximum bytes of a part of x, which stays in L2 while weights pass.
constexpr int64_t kInt4RowBytes = 512 << 10;
// Maximum bytes of words of a block.
constexpr int64_t kInt4BlockBytes = 256 << 10;

constexpr int64_t kInt4GroupWords = kInt4Group / kInt4InWord * kInt4Tile;

// sums[row, lane] = x[row] . w[lane] for some rows and `vectors` vectors of the 16 outputs of a tile.
template <int rows, int vectors>
PREJIT_INT4 void multiply_lanes(const Element* x, int64_t stride, const uint32_t* words, const uint16_t* scales,
                                int64_t inputs, float* sums) {
  const Unpacking unpacking;
  Floats total[rows][vectors] = {};
  for (int64_t k = 0; k < inputs; k += kInt4Group, scales += kInt4Tile) {
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
      for (int r = 0; r < rows; ++r)
        total[r][v] = multiply_add(part[0][r][v] + part[1][r][v], scale, total[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(sums + r * kInt4Tile + v * kLanes, total[r][v]);
}

// Does the same for the whole tile.
template <int rows>
PREJIT_INT4 void multiply_tile(const Element* x, int64_t stride, const uint32_t* words, const uint16_t* scales,
                               int64_t inputs, float* sums) {
  // Sums of two vectors fit the registers beside few rows.
  constexpr int vectors = kInt4Vectors > 1 && rows <= 2 ? 2 : 1;
  for (int v = 0; v < kInt4Vectors; v += vectors)
    multiply_lanes<rows, vectors>(x, stride, words + v * kLanes, scales + v * kLanes, inputs, sums + v * kLanes);
}

// The largest number of rows that is computed at once, of `rows`.
int64_t rows_of(int64_t rows) { return rows >= kInt4Rows ? kInt4Rows : rows >= 4 ? 4 : rows; }

void multiply(int64_t rows, const Element* x, int64_t stride, const Weights& weights, int64_t tile, float* sums) {
  const uint32_t* words = static_cast<const uint32_t*>(weights.data) + tile * stride / kInt4InWord * kInt4Tile;
  const uint16_t* scales = weights.group_scales + tile * stride / kInt4Group * kInt4Tile;
  switch (rows) {
    case 1: return multiply_tile<1>(x, stride, words, scales, stride, sums);
    case 2: return multiply_tile<2>(x, stride, words, scales, stride, sums);
    case 3: return multiply_tile<3>(x, stride, words, scales, stride, sums);
    case 4: return multiply_tile<4>(x, stride, words, scales, stride, sums);
    default: return multiply_tile<kInt4Rows>(x, stride, words, scales, stride, sums);
  }
}

bool multiply_all(const Linear& p) {
  int64_t tiles = (p.outputs + kInt4Tile - 1) / kInt4Tile;
  int64_t most = kInt4RowBytes / (p.inputs * static_cast<int64_t>(sizeof(Element)) + 1);
  most = most < kInt4Rows ? kInt4Rows : most / kInt4Rows * kInt4Rows;
  most = most < p.rows ? most : p.rows;
  Element* x = static_cast<Element*>(scratch((most * p.inputs + 64) * sizeof(Element)));
  if (!x) return false;
  // Tiles of a block: a stream, or less if the threads would not have a few blocks each.
  int64_t size = kInt4BlockBytes / (p.inputs / kInt4InWord * kInt4Tile * 4 + 1), fair = tiles / (8 * threads());
  size = size < fair ? size : fair;
  size = size < 1 ? 1 : size;
  for (int64_t first = 0; first < p.rows; first += most) {
    int64_t rows = p.rows - first < most ? p.rows - first : most;
    pack(p.x + first * p.inputs, rows * p.inputs, x);
    parallel_for((tiles + size - 1) / size, [&](int64_t block) {
      int64_t end = (block + 1) * size < tiles ? (block + 1) * size : tiles;
      for (int64_t tile = block * size; tile < end; ++tile) {
        int64_t output = tile * kInt4Tile, count = p.outputs - output < kInt4Tile ? p.outputs - output : kInt4Tile;
        alignas(64) float sums[kInt4Rows * kInt4Tile], up_sums[kInt4Rows * kInt4Tile];
        for (int64_t row = 0, some; row < rows; row += some) {
          some = rows_of(rows - row);
          multiply(some, x + row * p.inputs, p.inputs, p.weights, tile, sums);
          if (p.gated) multiply(some, x + row * p.inputs, p.inputs, p.up, tile, up_sums);
          for (int64_t r = 0; r < some; ++r)
            finish(p, sums + r * kInt4Tile, up_sums + r * kInt4Tile, first + row + r, output, count);
        }
      }
    });
  }
  return true;
}
