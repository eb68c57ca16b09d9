// Integers of four bits by AMX's tiles, for many rows. The low and the high halves of 4 rows of words are, as they
// lie, the tile of 32 inputs of 16 outputs. They are widened once for all rows of a part of x:
//
//   x [M, K]          -> [M / 16][K / 32] RowsOfGroup
//   words [K / 8][16] -> [K / 32] WeightsOfGroup      for each tile of 16 outputs; in L2
//   their products    -> [16 rows][16 outputs] int32  exact sums of 32 inputs, which vectors scale and add
//
// Scaling is the bound. For 32 inputs, 16 rows and 16 outputs AVX-512 needs 48 operations (64 with zero points), 24 cycles
// on two ports, and with those of tiles 56 loads, 28 cycles; the product of tiles takes 16. VNNI needs 64 for dots alone, and
// takes 1.25 to 1.4 times as long for 512 rows (Sapphire Rapids).
//
// Products and the order of sums are those of linear_int4_integers.h, and so are all bits.
#include <atomic>

#include "linear_finish.h"
#include "linear_int4.h"
#include "linear_int4_round.h"
#include "linear_multiplier.h"
#include "threads.h"

namespace prejit {

#if !defined(PREJIT_HAS_BYTE_TILES)

bool linear_int4_by_tiles(const Linear&) { return false; }

#else

namespace {

constexpr int64_t kRows = 16;      // Of a tile.
constexpr int64_t kAtOnce = 4;     // Groups: each has a tile of sums, so that none waits for the one before.
constexpr int64_t kTotals = kRegisters == 32 ? 16 : 8;  // Rows whose sums are in registers.
// Maximum bytes of a part of x, half of these CPUs' L2, and the fewest tiles of it that are worth widening weights.
constexpr int64_t kPartBytes = 1 << 20;
constexpr int64_t kFewestTilesOfPart = 4;
constexpr int64_t kMostTilesOfBlock = 8;  // Tiles of outputs.

// 32 inputs of 16 rows.
struct alignas(64) RowsOfGroup {
  int8_t x[kRows][kInt4Group];
  float scale[kRows];
  float sum[kRows];  // As round_group has it.
};

// 32 inputs of 16 outputs: bytes are integers, or with zero points 8 more, 0 .. 15.
struct alignas(64) WeightsOfGroup {
  uint8_t bytes[kInt4Group / 4][kInt4Tile][4];
  float scale[kInt4Tile];
  float less[kInt4Tile];  // What is subtracted from bytes; with zero points only.
};

using Products = int32_t[kAtOnce][kRows][kInt4Tile];
using Totals = float[kRows][kInt4Tile];

// Packs `count` rows; the others become zeros.
void pack_rows(const float* x, int64_t count, int64_t groups, RowsOfGroup* to) {
  for (int64_t g = 0; g < groups; ++g, x += kInt4Group) {
    for (int64_t r = 0; r < count; ++r)
      to[g].scale[r] = round_group(x + r * groups * kInt4Group, to[g].x[r], to[g].sum[r]);
    for (int64_t r = count; r < kRows; ++r) {
      memset(to[g].x[r], 0, kInt4Group);
      to[g].scale[r] = to[g].sum[r] = 0;
    }
  }
}

template <bool zeros>
void widen(const Weights& weights, int64_t tile, int64_t groups, WeightsOfGroup* to) {
  using Bytes = VectorOf<uint8_t, 4 * kLanes>::type;
  constexpr int64_t kWidth = zeros ? 2 * kInt4Tile : kInt4Tile;
  const uint32_t* words = static_cast<const uint32_t*>(weights.data) + tile * groups * (4 * kInt4Tile);
  const uint16_t* scales = weights.group_scales + tile * groups * kInt4Group / weights.group * kWidth;
  for (int64_t g = 0, end = weights.group; g < groups; ++g, ++to) {
    if (g * kInt4Group == end) scales += kWidth, end += weights.group;
    for (int64_t row = 0; row < kInt4Group / 4; row += 2, words += kInt4Tile) {
      __builtin_prefetch(reinterpret_cast<const char*>(words) + kInt4AheadBytes, 0, 2);
#pragma GCC unroll 2
      for (int64_t lane = 0; lane < kInt4Tile; lane += kLanes) {
        Bits word = load_as<Bits>(words + lane) ^ 0x88888888;
        Bytes low = reinterpret_cast<Bytes>(word & 0x0F0F0F0F), high = reinterpret_cast<Bytes>(word >> 4 & 0x0F0F0F0F);
        if constexpr (!zeros) low = low - 8, high = high - 8;
        memcpy(to->bytes[row][lane], &low, sizeof low);
        memcpy(to->bytes[row + 1][lane], &high, sizeof high);
      }
    }
#pragma GCC unroll 2
    for (int64_t lane = 0; lane < kInt4Tile; lane += kLanes) {
      store(to->scale + lane, load_halves(scales + lane));
      if constexpr (zeros) store(to->less + lane, splat(8) + load_halves(scales + kInt4Tile + lane));
    }
  }
}

#define PREJIT_TILES __attribute__((target("amx-tile,amx-int8")))

// Tiles 0 .. 3 are sums, 4 and 6 rows of x, 5 and 7 weights.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, kInt4Group, 64, kInt4Group, 64};
  uint8_t rows[16] = {kRows, kRows, kRows, kRows, kRows, kInt4Group / 4, kRows, kInt4Group / 4};
};
static_assert(sizeof(TileConfig) == 64, "as the instruction reads it");
const TileConfig tile_config;

PREJIT_TILES void take_tiles() { _tile_loadconfig(&tile_config); }
PREJIT_TILES void release_tiles() { _tile_release(); }

// A name of a tile is a literal.
#define PREJIT_MULTIPLY(group, sums, rows, weights) \
  _tile_zero(sums);                                 \
  _tile_loadd(rows, x[group].x, kInt4Group);        \
  _tile_loadd(weights, w[group].bytes, 64);         \
  _tile_dpbssd(sums, rows, weights);                \
  _tile_stored(sums, products[group], 64)

PREJIT_TILES void multiply_groups(const RowsOfGroup* x, const WeightsOfGroup* w, Products& products) {
  asm volatile("" ::: "memory");  // GCC's intrinsics do not declare that they read memory.
  PREJIT_MULTIPLY(0, 0, 4, 5);
  PREJIT_MULTIPLY(1, 1, 6, 7);
  PREJIT_MULTIPLY(2, 2, 4, 5);
  PREJIT_MULTIPLY(3, 3, 6, 7);
}

// Adds the products of `count` groups to the sums. multiply_lanes corrects bytes without zero points by the sum of x, which
// is exact: here they need no correction.
template <bool zeros>
void scale_groups(const RowsOfGroup* x, const WeightsOfGroup* w, const Products& products, int64_t count,
                  Totals& totals) {
  for (int64_t lane = 0; lane < kInt4Tile; lane += kLanes)
    for (int64_t row = 0; row < kRows; row += kTotals) {
      Floats total[kTotals];
#pragma GCC unroll 16
      for (int64_t r = 0; r < kTotals; ++r) total[r] = load(totals[row + r] + lane);
      for (int64_t g = 0; g < count; ++g) {
        Floats scale = load(w[g].scale + lane);
#pragma GCC unroll 16
        for (int64_t r = 0; r < kTotals; ++r) {
          Floats sum = __builtin_convertvector(load_as<Ints>(products[g][row + r] + lane), Floats);
          if constexpr (zeros) sum = multiply_add(splat(x[g].sum[row + r]), load(w[g].less + lane), sum);
          total[r] = multiply_add(sum * splat(x[g].scale[row + r]), scale, total[r]);
        }
      }
#pragma GCC unroll 16
      for (int64_t r = 0; r < kTotals; ++r) store(totals[row + r] + lane, total[r]);
    }
}

template <bool zeros>
void multiply(const RowsOfGroup* x, const WeightsOfGroup* w, int64_t groups, Totals& totals) {
  alignas(64) Products products;
  memset(totals, 0, sizeof totals);
  for (int64_t g = 0; g < groups; g += kAtOnce) {
    multiply_groups(x + g, w + g, products);
    scale_groups<zeros>(x + g, w + g, products, least(groups - g, kAtOnce), totals);
  }
}

// Some tiles of rows. The memory of each has whole kAtOnce groups; those beyond K are not written, and their products not
// read.
struct Part {
  int64_t first, rows;
  int64_t groups, stride;
  const RowsOfGroup* x;
};

bool multiply_tiles(const Linear& p, const Part& part, int64_t tile, int64_t end) {
  int64_t groups = p.gated ? 2 * part.stride : part.stride;
  WeightsOfGroup* w = static_cast<WeightsOfGroup*>(scratch(groups * sizeof(WeightsOfGroup) + 64, 1));
  if (!w) return false;
  take_tiles();
  for (; tile < end; ++tile) {
    auto widened = [&](const Weights& from, WeightsOfGroup* to) {
      (from.has_zeros ? widen<true> : widen<false>)(from, tile, part.groups, to);
    };
    widened(p.weights, w);
    if (p.gated) widened(p.up, w + part.stride);
    int64_t output = tile * kInt4Tile, outputs = least(p.outputs - output, kInt4Tile);
    for (int64_t row = 0; row < part.rows; row += kRows) {
      const RowsOfGroup* x = part.x + row / kRows * part.stride;
      int64_t rows = least(part.rows - row, kRows);
      // The lines of y come while tiles are multiplied. Stores would wait for them: a tenth of 512 rows.
      for (int64_t r = 0; r < rows; ++r) __builtin_prefetch(p.y + (part.first + row + r) * p.outputs + output, 1);
      alignas(64) Totals sums, up_sums;
      (p.weights.has_zeros ? multiply<true> : multiply<false>)(x, w, part.groups, sums);
      if (p.gated) (p.up.has_zeros ? multiply<true> : multiply<false>)(x, w + part.stride, part.groups, up_sums);
      for (int64_t r = 0; r < rows; ++r)
        finish(p, sums[r], up_sums[r], part.first + row + r, output, outputs);
    }
  }
  release_tiles();
  return true;
}

}  // namespace

bool linear_int4_by_tiles(const Linear& p) {
  int64_t groups = p.inputs / kInt4Group, stride = parts_of(groups, kAtOnce) * kAtOnce;
  int64_t most = kPartBytes / (stride * static_cast<int64_t>(sizeof(RowsOfGroup)) + 1);
  most = most < kFewestTilesOfPart ? kFewestTilesOfPart : most;
  int64_t row_tiles = parts_of(p.rows, kRows), tiles = parts_of(p.outputs, kInt4Tile);
  int64_t size = least(parts_of(tiles, 8 * threads()), kMostTilesOfBlock);
  RowsOfGroup* x = static_cast<RowsOfGroup*>(scratch(least(row_tiles, most) * stride * sizeof(RowsOfGroup) + 64));
  if (!x) return false;
  std::atomic<bool> has_memory{true};
  for (int64_t row = 0; row < p.rows; row += most * kRows) {
    Part part = {row, least(p.rows - row, most * kRows), groups, stride, x};
    parallel_for(parts_of(part.rows, kRows), [&](int64_t tile) {
      int64_t at = tile * kRows;
      pack_rows(p.x + (row + at) * p.inputs, least(part.rows - at, kRows), groups, x + tile * stride);
    });
    parallel_for(parts_of(tiles, size), [&](int64_t block) {
      if (!multiply_tiles(p, part, block * size, least(tiles, (block + 1) * size)))
        has_memory.store(false, std::memory_order_relaxed);
    });
  }
  return has_memory.load(std::memory_order_relaxed);
}

#endif  // PREJIT_HAS_BYTE_TILES

}  // namespace prejit
