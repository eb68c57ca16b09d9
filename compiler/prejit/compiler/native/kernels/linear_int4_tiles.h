// The loops of linear_int4.h over rows, tiles and groups. A source that includes this defines before
//
//   PREJIT_INT4          the attributes of functions, with the instructions that they may use
//   Element              of x as it is packed
//   pack                 rounds x
//   load_element         loads x as it is packed
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

// Some rows as they are packed.
struct Packed {
  const Element* x;
  const float* sums;  // [row, inputs / 32]: minus the sums of 32 x, if there are zero points.
  int64_t inputs;
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

// Does the same for the whole tile.
template <int rows, bool zeros>
PREJIT_INT4 void multiply_tile(const Packed& x, const uint32_t* words, const uint16_t* scales, int64_t group, float* sums) {
  // Sums of two vectors fit the registers beside few rows.
  constexpr int vectors = kInt4Vectors > 1 && rows <= 2 ? 2 : 1;
  for (int v = 0; v < kInt4Vectors; v += vectors)
    multiply_lanes<rows, vectors, zeros>(x, words + v * kLanes, scales + v * kLanes, group, sums + v * kLanes);
}

// The largest number of rows that is computed at once, of `rows`.
int64_t rows_of(int64_t rows) { return rows >= kInt4Rows ? kInt4Rows : rows >= 4 ? 4 : rows; }

template <bool zeros>
void multiply(int64_t rows, const Packed& x, const Weights& weights, int64_t tile, float* sums) {
  constexpr int64_t kWidth = zeros ? 2 * kInt4Tile : kInt4Tile;
  const uint32_t* words = static_cast<const uint32_t*>(weights.data) + tile * x.inputs / kInt4InWord * kInt4Tile;
  const uint16_t* scales = weights.group_scales + tile * x.inputs / weights.group * kWidth;
  switch (rows) {
    case 1: return multiply_tile<1, zeros>(x, words, scales, weights.group, sums);
    case 2: return multiply_tile<2, zeros>(x, words, scales, weights.group, sums);
    case 3: return multiply_tile<3, zeros>(x, words, scales, weights.group, sums);
    case 4: return multiply_tile<4, zeros>(x, words, scales, weights.group, sums);
    default: return multiply_tile<kInt4Rows, zeros>(x, words, scales, weights.group, sums);
  }
}

// Writes minus the sums of 32 elements each, in one order.
void sum_groups(const Element* x, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kInt4Group) {
    Floats sums = {};
    for (int64_t lane = 0; lane < kInt4Group; lane += kLanes) sums = sums + load_element(x + i + lane);
    to[i / kInt4Group] = -sum(sums);
  }
}

bool multiply_all(const Linear& p) {
  int64_t tiles = (p.outputs + kInt4Tile - 1) / kInt4Tile;
  int64_t most = kInt4RowBytes / (p.inputs * static_cast<int64_t>(sizeof(Element)) + 1);
  most = most < kInt4Rows ? kInt4Rows : most / kInt4Rows * kInt4Rows;
  most = most < p.rows ? most : p.rows;
  bool has_zeros = p.weights.has_zeros || (p.gated && p.up.has_zeros);
  int64_t elements = most * p.inputs + 64;
  Element* x = static_cast<Element*>(scratch(elements * sizeof(Element) + most * p.inputs / kInt4Group * sizeof(float)));
  if (!x) return false;
  float* x_sums = reinterpret_cast<float*>(x + elements);
  // Tiles of a block: a stream, or less if the threads would not have a few blocks each.
  int64_t size = kInt4BlockBytes / (p.inputs / kInt4InWord * kInt4Tile * 4 + 1), fair = tiles / (8 * threads());
  size = size < fair ? size : fair;
  size = size < 1 ? 1 : size;
  for (int64_t first = 0; first < p.rows; first += most) {
    int64_t rows = p.rows - first < most ? p.rows - first : most;
    pack(p.x + first * p.inputs, rows * p.inputs, x);
    if (has_zeros) sum_groups(x, rows * p.inputs, x_sums);
    parallel_for((tiles + size - 1) / size, [&](int64_t block) {
      int64_t end = (block + 1) * size < tiles ? (block + 1) * size : tiles;
      for (int64_t tile = block * size; tile < end; ++tile) {
        int64_t output = tile * kInt4Tile, count = p.outputs - output < kInt4Tile ? p.outputs - output : kInt4Tile;
        alignas(64) float sums[kInt4Rows * kInt4Tile], up_sums[kInt4Rows * kInt4Tile];
        for (int64_t row = 0, some; row < rows; row += some) {
          some = rows_of(rows - row);
          Packed packed = {x + row * p.inputs, x_sums + row * p.inputs / kInt4Group, p.inputs};
          auto with = [&](const Weights& weights, float* to) {
            (weights.has_zeros ? multiply<true> : multiply<false>)(some, packed, weights, tile, to);
          };
          with(p.weights, sums);
          if (p.gated) with(p.up, up_sums);
          for (int64_t r = 0; r < some; ++r)
            finish(p, sums + r * kInt4Tile, up_sums + r * kInt4Tile, first + row + r, output, count);
        }
      }
    });
  }
  return true;
}
