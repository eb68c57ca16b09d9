// What linear_multiplier.cc would choose on a CPU with the tiles of amx_model.h alone: this file stands in its place, and in
// that of the products by AVX-512 BF16, which have no model.
#include <atomic>

#include "linear_dot_bf16.h"
#include "linear_int4.h"
#include "linear_multiplier.h"
#include "linear_outputs_bf16.h"

namespace prejit {
namespace {

#if defined(__AVX512F__)
constexpr Multiplier kBest = Multiplier::kAmx;
#else
constexpr Multiplier kBest = Multiplier::kFloat32;
#endif
std::atomic<Multiplier> chosen{kBest};
std::atomic<bool> chosen_byte_tiles{true};

}  // namespace

Multiplier multiplier() { return chosen.load(); }
bool use_multiplier(Multiplier wanted) {
  if (wanted != Multiplier::kFloat32 && wanted != kBest) return false;
  chosen.store(wanted);
  return true;
}
bool vnni() { return false; }
bool use_vnni(bool wanted) { return !wanted; }
bool byte_tiles() { return chosen_byte_tiles.load(); }
bool use_byte_tiles(bool wanted) {
  chosen_byte_tiles.store(wanted);
  return true;
}

bool linear_by_bf16_dots(const Linear&) { return false; }
bool linear_by_bf16_outputs(const Linear&) { return false; }
bool linear_int4_by_bf16(const Linear&) { return false; }

}  // namespace prejit
