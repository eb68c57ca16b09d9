// A model of AMX's tiles in C++, for CPUs without them. A compiler includes it before a source (-include), after
// avx512_model.h where the CPU lacks AVX-512 too. It stops the process where an instruction would fault: at a wrong
// configuration, or tiles that do not fit each other.
//
// Written from Intel's Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBSSD, TDPBF16PS.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_model {

constexpr int kTiles = 8;

struct Tile {
  int rows = 0, row_bytes = 0;
  unsigned char data[16][64] = {};
};

struct State {
  bool is_configured = false;
  Tile tiles[kTiles];
};
inline thread_local State state;

inline void require(bool is_so, const char* what) {
  if (is_so) return;
  std::printf("tiles: %s\n", what);
  std::fflush(stdout);
  std::abort();
}

inline Tile& tile(int name) {
  require(state.is_configured, "no configuration");
  require(name >= 0 && name < kTiles && state.tiles[name].rows > 0, "a tile without a size");
  return state.tiles[name];
}

inline void load_config(const void* from) {
  const unsigned char* bytes = static_cast<const unsigned char*>(from);
  require(bytes[0] == 1 && bytes[1] == 0, "another palette or start row");
  for (int i = 2; i < 16; ++i) require(bytes[i] == 0, "reserved bytes that are no zeros");
  state = State{};
  state.is_configured = true;
  for (int i = 0; i < 16; ++i) {
    int row_bytes = bytes[16 + 2 * i] | bytes[17 + 2 * i] << 8, rows = bytes[48 + i];
    require(row_bytes <= 64 && rows <= 16 && (row_bytes == 0) == (rows == 0), "a tile that is too large");
    require(i < kTiles || rows == 0, "a tile that is not there");
    if (i < kTiles) state.tiles[i].rows = rows, state.tiles[i].row_bytes = row_bytes;
  }
}

inline void release() { state = State{}; }

inline void zero(int to) {
  Tile& t = tile(to);
  std::memset(t.data, 0, sizeof t.data);
}

inline void load(int to, const void* from, long stride) {
  Tile& t = tile(to);
  std::memset(t.data, 0, sizeof t.data);
  for (int r = 0; r < t.rows; ++r) std::memcpy(t.data[r], static_cast<const char*>(from) + r * stride, t.row_bytes);
}

inline void store(int from, void* to, long stride) {
  Tile& t = tile(from);
  for (int r = 0; r < t.rows; ++r) std::memcpy(static_cast<char*>(to) + r * stride, t.data[r], t.row_bytes);
}

// Calls add(sum, four bytes of a, four bytes of b) for each lane of a row of sums and each four bytes of a row of a.
template <typename Sum, typename Add>
void multiply(int sums, int left, int right, Add add) {
  Tile &c = tile(sums), &a = tile(left), &b = tile(right);
  require(sums != left && sums != right && left != right, "one tile twice");
  require(c.rows == a.rows && c.row_bytes == b.row_bytes && a.row_bytes == 4 * b.rows, "tiles of sizes that do not fit");
  for (int m = 0; m < c.rows; ++m) {
    Sum row[16];
    std::memcpy(row, c.data[m], sizeof row);
    for (int k = 0; k < b.rows; ++k)
      for (int n = 0; n < 16; ++n) row[n] = add(row[n], a.data[m] + 4 * k, b.data[k] + 4 * n);
    std::memcpy(c.data[m], row, c.row_bytes);
  }
}

inline void multiply_bytes(int sums, int left, int right) {
  multiply<int32_t>(sums, left, right, [](int32_t sum, const unsigned char* a, const unsigned char* b) {
    for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(a[i]) * static_cast<int8_t>(b[i]);
    return sum;
  });
}

// Subnormal numbers are zeros.
inline float bf16(const unsigned char* from) {
  uint32_t bits = static_cast<uint32_t>(from[0]) << 16 | static_cast<uint32_t>(from[1]) << 24;
  if ((bits & 0x7F800000) == 0) bits &= 0x80000000;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}

inline void multiply_pairs(int sums, int left, int right) {
  multiply<float>(sums, left, right, [](float sum, const unsigned char* a, const unsigned char* b) {
    return std::fma(bf16(a + 2), bf16(b + 2), std::fma(bf16(a), bf16(b), sum));
  });
}

}  // namespace amx_model

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_model::load_config
#define _tile_release amx_model::release
#define _tile_zero amx_model::zero
#define _tile_loadd amx_model::load
#define _tile_stored amx_model::store
#define _tile_dpbssd amx_model::multiply_bytes
#define _tile_dpbf16ps amx_model::multiply_pairs
