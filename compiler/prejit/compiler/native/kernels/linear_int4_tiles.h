// The loops of linear_int4.h over rows and tiles. A source that includes this defines before
//
//   PREJIT_INT4       the attributes of functions, with the instructions that they may use
//   Packed            some rows as they are packed:
//     kTakesZeros       whether weights may have zero points
//     bytes             the memory that they need; the constructor writes them there
//     behind            the same without the first rows
//   multiply_lanes    sums[row, lane] = x[row] . w[lane], for some rows and `vectors` vectors of the outputs of a tile
//
// in an unnamed namespace, as this is compiled once for each way to multiply and each kind of values.

// Does what multiply_lanes does for the whole tile.
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

bool multiply_all(const Linear& p) {
  int64_t tiles = (p.outputs + kInt4Tile - 1) / kInt4Tile;
  int64_t most = kInt4RowBytes / (Packed::bytes(1, p.inputs) + 1);
  most = most < kInt4Rows ? kInt4Rows : most / kInt4Rows * kInt4Rows;
  most = most < p.rows ? most : p.rows;
  void* memory = scratch(Packed::bytes(most, p.inputs));
  if (!memory) return false;
  // Tiles of a block: a stream, or less if the threads would not have a few blocks each.
  int64_t size = kInt4BlockBytes / (p.inputs / kInt4InWord * kInt4Tile * 4 + 1), fair = tiles / (8 * threads());
  size = size < fair ? size : fair;
  size = size < 1 ? 1 : size;
  for (int64_t first = 0; first < p.rows; first += most) {
    int64_t rows = p.rows - first < most ? p.rows - first : most;
    const Packed x(p.x + first * p.inputs, rows, p.inputs, memory);
    parallel_for((tiles + size - 1) / size, [&](int64_t block) {
      int64_t end = (block + 1) * size < tiles ? (block + 1) * size : tiles;
      for (int64_t tile = block * size; tile < end; ++tile) {
        int64_t output = tile * kInt4Tile, count = p.outputs - output < kInt4Tile ? p.outputs - output : kInt4Tile;
        alignas(64) float sums[kInt4Rows * kInt4Tile], up_sums[kInt4Rows * kInt4Tile];
        for (int64_t row = 0, some; row < rows; row += some) {
          some = rows_of(rows - row);
          auto with = [&](const Weights& weights, float* to) {
            if constexpr (Packed::kTakesZeros)
              if (weights.has_zeros) return multiply<true>(some, x.behind(row), weights, tile, to);
            multiply<false>(some, x.behind(row), weights, tile, to);
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
